"""Which samples go through the model together, and how large a step is. Pure functions: both are known before the
first forward pass."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from aglite.errors import AgliteError

Rollout = TypeVar("Rollout")


def learning_rate(peak: float, step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """The learning rate of step `step`, from 0 to `steps` - 1.

    It rises as peak * (step + 1) / (warmup_steps + 1), then is peak times

    - `constant`: 1;
    - `linear`: 1 - p;
    - `cosine`: (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, SGDR, without restarts),

    with p = (step - warmup_steps) / (steps - warmup_steps), so that it would be 0 in the step after the last. It
    depends on nothing but its arguments, so a resumed run has what it would have had.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    share = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - share)
        case "cosine":
            return peak * (1 + math.cos(math.pi * share)) / 2
    raise ValueError(f"no learning rate schedule is called {schedule!r}")


def plan_micro_batches(
    lengths: Sequence[int], budget: int, *, names: Sequence[str] | None = None, allow_longer: bool = False
) -> list[list[int]]:
    """Split samples into micro-batches of at most `budget` tokens each, as equally full as whole samples allow.

    `lengths` are tokens; the result holds every index once. The largest micro-batch exceeds the smallest by no more
    than the longest sample, and as few are made as the greedy rule (the longest next, to the emptiest; Graham 1969)
    can keep under the budget. Gradients are summed over micro-batches, so the split has no influence on the update.

    A sample longer than the budget raises AgliteError that names it (`names`) and the setting, or gets a micro-batch of
    its own with `allow_longer`.
    """
    longer = [index for index, length in enumerate(lengths) if length > budget]
    if longer and not allow_longer:
        worst = max(longer, key=lambda index: lengths[index])
        name = names[worst] if names else f"sample {worst}"
        raise AgliteError(
            f"{name} has {lengths[worst]} tokens, more than one micro-batch may hold "
            f"(trainer.tokens_per_micro_batch: {budget})",
            f"set trainer.tokens_per_micro_batch to at least {lengths[worst]}, or lower engine.context_length",
        )
    rest = sorted(set(range(len(lengths))) - set(longer), key=lambda index: (-lengths[index], index))
    batches = [[index] for index in longer]
    if rest:
        fewest = max(1, -(-sum(lengths[index] for index in rest) // budget))
        batches += next(
            plan
            for count in range(fewest, len(rest) + 1)
            if (plan := _balance(rest, lengths, count, budget)) is not None
        )
    return batches


def split_mini_batches(rollouts: Sequence[Rollout], n: int) -> list[list[Rollout]]:
    """Split rollouts into n mini-batches, one optimizer update each, whose sizes differ by at most one.

    Fewer when there are fewer rollouts: no mini-batch is empty. A rollout is never split: its weights are relative to
    its mini-batch.
    """
    n = min(n, len(rollouts))
    bounds = [len(rollouts) * part // n for part in range(n + 1)] if n else [0]
    return [list(rollouts[start:stop]) for start, stop in pairwise(bounds)]


def _balance(order: Sequence[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Deal samples, the longest first, to the emptiest of `count` micro-batches; None if one runs over the budget."""
    heap: list[tuple[int, int]] = [(0, batch) for batch in range(count)]
    batches: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        tokens, batch = heap[0]
        if tokens + lengths[index] > budget:
            return None
        batches[batch].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], batch))
    return [sorted(batch) for batch in batches]
