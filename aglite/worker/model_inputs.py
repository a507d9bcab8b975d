"""What the model gets of a micro-batch, and how its logits are read: the same on every device.

A micro-batch is one sequence. Where a mask of its own can be given to the attention (`sdpa`), a prefix that several
rows share is computed once: a forest, see `packing`. Everywhere else the rows follow each other and nothing is shared:

- flash attention takes the lengths of the rows instead of a mask;
- models in which not every layer attends to everything before (sliding windows) make their own masks, from positions;
- models with a state that runs along the sequence (linear attention) get one row at a time.

Logits are computed only where a trained token is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from aglite.worker.packing import build_forest, row_by_row


@dataclass(slots=True, frozen=True)
class Layout:
    """How the rows of a micro-batch become one sequence."""

    shared: bool = True
    """Whether a common prefix is computed once."""
    alone: bool = False
    """Whether a micro-batch is one row."""
    lengths: bool = False
    """Whether attention is given the rows' lengths (flash attention)."""


def layout_for(model: Any, attention: str) -> Layout:
    """The layout for a transformers model (adapter or not) whose attention is `flash_attention_2` or `sdpa`."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    flash = attention == "flash_attention_2"
    alone = bool(getattr(base, "_is_stateful", False))
    return Layout(
        shared=not alone and not flash and _sees_everything(base.config), alone=alone, lengths=flash and not alone
    )


def _sees_everything(config: Any) -> bool:
    """Whether every layer attends to all tokens before."""
    config = config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"full_attention"}
    if getattr(config, "attention_chunk_size", None):
        return False
    return not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", None) is False


def model_inputs(
    input_ids: torch.Tensor, response_mask: torch.Tensor, temperature: float, layout: Layout
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model gets for a micro-batch, and what `read_logits` needs to read its logits.

    `input_ids` is nested [rows, length of the row]; `response_mask` [rows, longest - 1] is 1 where the *next* token
    is trained.
    """
    device = input_ids.device
    ids, offsets = input_ids.values().tolist(), input_ids.offsets().tolist()
    rows = [ids[start:end] for start, end in pairwise(offsets)]
    forest = build_forest(rows) if layout.shared else row_by_row(rows)
    nodes, labels, places = [], [], []
    for row, path, trained, offset in zip(rows, forest.paths, response_mask.tolist(), offsets, strict=False):
        for at in (at for at in range(len(row) - 1) if trained[at]):
            nodes.append(path[at])
            labels.append(row[at + 1])
            places.append(offset + at)
    kept, index = torch.tensor(nodes, dtype=torch.long, device=device).unique(return_inverse=True)
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([forest.ids], device=device),
        "position_ids": torch.tensor([forest.positions], device=device),
        "attention_mask": _forest_mask(forest, device) if layout.shared else None,
        "logits_to_keep": kept,
    }
    if layout.lengths:
        ends = torch.tensor(offsets, dtype=torch.int32, device=device)
        longest = max(map(len, rows))
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    outputs = {
        "temperature": float(temperature),
        "kept": kept,
        "index": index,
        "labels": torch.tensor(labels, dtype=torch.long, device=device),
        "places": torch.tensor(places, dtype=torch.long, device=device),
    }
    return inputs, outputs


def _forest_mask(forest: Any, device: torch.device) -> torch.Tensor:
    """Which node attends to which: bool [1, 1, nodes, nodes]."""
    size = len(forest.ids)
    mask = torch.zeros(size, size, dtype=torch.bool, device=device)
    for path, (first, end, shared) in zip(forest.paths, forest.spans, strict=True):
        own = torch.ones(end - first, len(path), dtype=torch.bool, device=device).tril(shared)
        mask[first:end, torch.tensor(path, device=device)] = own
    return mask[None, None]


def read_logits(
    logits: torch.Tensor,
    args: dict[str, Any],
    input_ids: torch.Tensor,
    calculate_entropy: bool,
    entropy_gradient: bool = False,
) -> dict[str, torch.Tensor]:
    """Per-token log-probabilities (and entropy, with or without gradient) as verl shapes them: nested like `input_ids`,
    the value at i belongs to token i + 1, 0 where that token is not trained. In float32, whatever the model computes
    in.

    `logits` [kept nodes, vocabulary], or of all nodes where the model leaves `logits_to_keep` alone, is scaled in
    place if it is float32.
    """
    if logits.shape[0] != len(args["kept"]):
        logits = logits[args["kept"]]
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if args["temperature"] != 1.0:
        logits = logits.div_(args["temperature"])
    normalizer = logits.logsumexp(-1)
    log_probs = logits[args["index"], args["labels"]] - normalizer[args["index"]]
    output = {"log_probs": _nested(log_probs, args["places"], input_ids)}
    if calculate_entropy:
        with torch.set_grad_enabled(entropy_gradient and logits.requires_grad):
            # H = log Z - sum p * logit
            probabilities = (logits - normalizer[:, None]).exp_()
            product = probabilities * logits if torch.is_grad_enabled() else probabilities.mul_(logits)
            entropy = normalizer - product.sum(-1)
            output["token_entropy"] = _nested(entropy[args["index"]], args["places"], input_ids)
    return output


def _nested(values: torch.Tensor, places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    flat = values.new_zeros(like.values().shape[0]).index_put((places,), values)
    return torch.nested.nested_tensor_from_jagged(flat, like.offsets())
