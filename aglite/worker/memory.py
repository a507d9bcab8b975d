"""How much memory a forward and backward pass takes on the CPU, known before the first one of a step.

On a GPU a pass may fail and be tried again (`gpu_memory`); a machine whose memory runs out ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aglite.errors import AgliteError
from aglite.host_memory import free_bytes
from aglite.worker.batch import Row
from aglite.worker.model_inputs import Layout
from aglite.worker.sharding import local

TRIED = (16, 32, 64)
"""Tokens of the passes that are measured."""
LOGITS = 3
"""Arrays of the size of the logits that a pass holds at once: they, their gradient, and one on the way to it."""


class Room:
    """Whether the micro-batches of a step fit into what is left of the machine's memory."""

    def __init__(self, module: torch.nn.Module, layout: Layout, dtype: torch.dtype) -> None:
        self._module = module
        self._need = pass_bytes(module, layout, dtype)

    def check(
        self, parts: list[list[int]], sizes: list[tuple[int, int]], rows: Sequence[Row], names: Sequence[str]
    ) -> int:
        """Bytes that the largest micro-batch will take. Raises AgliteError when there are not as many left.

        `parts` holds the row numbers of each micro-batch, `sizes` its tokens and how many of them have logits, `names`
        the rollout of each row.
        """
        need, part = max((self._need(*size), part) for size, part in zip(sizes, parts, strict=True))
        trained = [one for one in self._module.parameters() if one.requires_grad]
        gradients = sum(one.numel() * one.element_size() for one in trained if one.grad is None)
        if need + gradients > (free := free_bytes()):
            longest = max(part, key=lambda index: len(rows[index].ids))
            several = f"{len(part)} samples, the longest of them" if len(part) > 1 else "one sample"
            raise AgliteError(
                f"the step does not fit into memory: a micro-batch of {several} of rollout {names[longest]} with "
                f"{len(rows[longest].ids)} tokens, takes {need + gradients >> 20} MB, and {free >> 20} MB are left",
                "lower trainer.tokens_per_micro_batch and start again: the run goes on"
                if len(part) > 1
                else "free memory and start again, the run goes on; or begin one with a lower engine.context_length",
            )
        return need


def pass_bytes(module: torch.nn.Module, layout: Layout, dtype: torch.dtype) -> Callable[[int, int], int]:
    """A function of (tokens of a micro-batch, those of them with logits) that says how many bytes a pass will hold.

    What autograd keeps for the backward pass is a polynomial of the tokens: each has its activations, each pair an
    entry of the attention mask. So it is measured on three short passes, whatever the architecture is. `dtype`: what
    the pass computes in. With gradient checkpointing a pass holds the input of every layer, and all of one layer.
    """
    config = module.config.get_text_config()
    checkpointed = bool(getattr(module, "is_gradient_checkpointing", False))
    if checkpointed:
        module.gradient_checkpointing_disable()
    sizes = [_saved_bytes(module, tokens, layout, dtype) for tokens in TRIED]
    if checkpointed:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    (a, b, c), (x, y, z) = TRIED, sizes
    square = ((z - x) / (c - a) - (y - x) / (b - a)) / (c - b)
    slope = (y - x) / (b - a) - square * (a + b)
    constant = x - slope * a - square * a * a
    if checkpointed:
        layers = config.num_hidden_layers
        constant, slope = constant / layers, slope / layers + layers * config.hidden_size * dtype.itemsize
    logit_bytes = LOGITS * config.vocab_size * torch.float32.itemsize
    return lambda tokens, logits: round(constant + slope * tokens + square * tokens**2 + logit_bytes * logits)


def _saved_bytes(module: torch.nn.Module, tokens: int, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of what autograd keeps of a forward pass with one logit; the weights, which are there anyway, left out."""
    own = {local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
    seen: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no other one takes its place
        return tensor

    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if layout.shared else None
    autocast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)
    with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(
            input_ids=torch.zeros(1, tokens, dtype=torch.long),
            position_ids=torch.arange(tokens)[None],
            attention_mask=mask,
            logits_to_keep=torch.tensor([tokens - 1]),
            use_cache=False,
        )
    return sum(storage.nbytes() for storage in seen.values())
