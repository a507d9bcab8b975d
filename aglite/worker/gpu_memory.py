"""What a step holds on a GPU: the most of it in each phase, and who holds what when there is no more."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from verl.utils.device import get_device_name, get_torch_device

from aglite.errors import AgliteError
from aglite.gpus import called, holders_of
from aglite.units import gib
from aglite.worker.sharding import local

if TYPE_CHECKING:
    from aglite.worker.verl_worker import Setup

SIGNIFICANT = 2**30
"""Bytes of other processes from which on they are worth a word of advice."""


@dataclass(slots=True)
class Phases:
    """Where a step is, and the most that each of its phases has held."""

    phase: str = ""
    doing: str = ""
    """What is being done, as the end of "the GPU's memory ran out while ..."."""
    tokens: int = 0
    """Of the step's largest micro-batch."""
    many_rows: bool = False
    divisible: bool = False
    """Whether smaller micro-batches are possible, and no weight has been updated yet."""
    pass_bytes: int = 0
    """The most that a micro-batch has held besides weights and gradients."""
    peaks: dict[str, int] = field(default_factory=dict)

    def begin(self, sizes: list[tuple[int, int]], many_rows: bool, alone: bool = True) -> None:
        """A step begins whose micro-batches have `sizes` (tokens, those of them with logits). `alone`: there is one
        rank; the others could not know that a pass is to be tried again."""
        self.tokens = max(tokens for tokens, _ in sizes)
        self.many_rows, self.divisible = many_rows, many_rows and alone
        self.pass_bytes = 0
        self.phase = ""
        self.peaks = {}

    def enter(self, phase: str, doing: str) -> None:
        self._leave()
        self.phase, self.doing = phase, doing
        get_torch_device().reset_peak_memory_stats()

    def _leave(self) -> None:
        device = get_torch_device()
        peak = device.max_memory_allocated()
        if self.phase:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), peak)
        if self.phase == "train":
            self.pass_bytes = max(self.pass_bytes, peak - device.memory_allocated())

    def metrics(self) -> dict[str, Any]:
        """The peaks in MB by phase; nothing on the CPU, where nobody counts."""
        self._leave()
        if get_device_name() == "cpu":
            return {}
        return {"gpu_peak_mb": {phase: -(-peak // 2**20) for phase, peak in self.peaks.items()}}


@dataclass(slots=True, frozen=True)
class Holders:
    """What holds the memory of a GPU, in bytes."""

    total: int
    weights: int
    gradients: int
    optimizer: int
    rest: int
    """Of this process at the most that was held: activations and logits, and copies of weights on their way."""
    others: list[tuple[str, int]]
    """Other processes, (name and number, bytes), the largest first."""

    def __str__(self) -> str:
        named = (("weights", self.weights), ("gradients", self.gradients), ("optimizer", self.optimizer))
        parts = [f"{name} {gib(held)}" for name, held in (*named, ("activations and logits", self.rest)) if held]
        others = [f"{name} {gib(held)}" for name, held in self.others if held]
        return f"of {gib(self.total)}: {', '.join([*parts, *others])}"


def holders(parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Holders:
    """What holds the memory of this process's GPU. To be called before anything is freed."""
    parameters = list(parameters)
    weights = _on_gpu(parameters)
    gradients = _on_gpu(p.grad for p in parameters if p.grad is not None)
    state = _on_gpu(v for held in optimizer.state.values() for v in held.values() if isinstance(v, torch.Tensor))
    free, total = torch.cuda.mem_get_info()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    others = other_processes() or [("everything outside this process", max(0, total - free - reserved))]
    return Holders(total, weights, gradients, state, max(0, peak - weights - gradients - state), others)


def other_processes() -> list[tuple[str, int]]:
    """Processes that compute on this process's GPU besides it, by what the driver says; in a container it may say
    nothing."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    held = holders_of(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return [(called(one), one["mem"] or 0) for one in held if one["pid"] != os.getpid()]


def out_of_memory(phases: Phases, held: Holders, setup: Setup) -> AgliteError:
    """The error for a step that a GPU had no memory for, with the settings that would change it."""
    advice = []
    if phases.phase not in ("onload", "optimizer"):
        many = phases.many_rows
        advice.append("lower trainer.tokens_per_micro_batch" if many else "lower engine.context_length (another run)")
        if not setup.gradient_checkpointing:
            advice.append("set trainer.gradient_checkpointing: true")
    if not setup.offload_optimizer and not setup.lora:
        advice.append("set trainer.offload_optimizer: true")
    if not setup.lora:
        advice.append("train an adapter (trainer.lora; another run)")
    if sum(count for _, count in held.others) > SIGNIFICANT:
        advice.append("lower engine.gpu_memory_utilization, or end what else uses the GPU")
    return AgliteError(
        f"the GPU's memory ran out while {phases.doing}; it holds, {held}",
        f"{'; '.join(advice)}; and start again: the run goes on from its last checkpoint",
    )


def _on_gpu(tensors: Iterable[torch.Tensor]) -> int:
    parts = map(local, tensors)
    return sum(part.numel() * part.element_size() for part in parts if part.device.type == "cuda")
