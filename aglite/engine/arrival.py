"""Whether weights that were sent to an engine are those it computes with now, told by what it makes of one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TEXT = (
    "A recipe says what to train, on which tasks, and how an answer is graded. The agent reads the first of them, "
    "calls a tool, looks at the result and goes on: 3 + 4 = 7, not 12. When it has finished, somebody else counts."
)
TOLERANCE = {"float32": 1e-3}
"""Nats by which the log-probabilities may differ on average under the same weights; 16-bit types round by more."""
ROUNDED = 0.1


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the text's tokens by the engine and by the trainer, which should have the same weights."""

    engine: list[float]
    trainer: list[float]


def problem(now: Answers, before: Answers | None, tolerance: float) -> str:
    """What is wrong with the engine's weights, '' if nothing is.

    Under the same weights the mean gap |engine - trainer| stays within `tolerance`. A small update may change less than
    that: then the gap to the trainer is compared with what it would be had nothing arrived, |engine before - trainer
    now|, where that stands out of what rounding makes of it, |engine before - trainer before|.
    """
    gap = _gap(now.engine, now.trainer)
    if not gap <= tolerance:  # not finite: never
        return f"log-probabilities of engine and trainer differ by {gap:.2g} on average, {tolerance:g} are allowed"
    if before is None:
        return ""
    moved = max(abs(one - other) for one, other in zip(before.trainer, now.trainer, strict=True))
    if now.engine == before.engine and moved > 1e-5:
        return f"the engine computes what it did before the update, the trainer does not (differs by up to {moved:.2g})"
    stale, noise = _gap(before.engine, now.trainer), _gap(before.engine, before.trainer)
    if stale > 4 * max(noise, 1e-6) and gap > stale / 2:
        return f"the engine is {gap:.2g} away from the trainer, and would be {stale:.2g} with the weights from before"
    return ""


def _gap(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(len(one), 1)
