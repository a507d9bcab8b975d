"""Whether a run is about to be lost: updates that are not finite, entropy, KL, lengths or rewards running away.

Pure functions over a small state that a checkpoint holds. What runs away is seen against the run's own beginning: a
window of steps at its start and one at its end are compared, so that one odd step trips nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aglite.config import Guard

SIGMAS = 3.5
"""Standard errors that a fall of the reward must exceed."""


@dataclass(slots=True)
class GuardState:
    """What was seen so far; `first` and `last` hold at most a few windows of values by measure."""

    not_finite: int = 0
    """Updates in a row that were not applied."""
    first: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, list[float]] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """The best validation reward by kind of task ('' for all)."""
    tripped: str = ""
    """Why the run is held; '' when it is not."""

    def forgive(self) -> None:
        """Go on as somebody wants: what comes now is compared with what comes next."""
        self.not_finite, self.tripped = 0, ""
        self.first.clear()
        self.last.clear()
        self.best.clear()


def watch(
    state: GuardState,
    settings: Guard,
    metrics: Mapping[str, float],
    rewards: Mapping[str, Sequence[float]],
    *,
    finite: bool | None,
) -> list[str]:
    """Take note of a step; returns what runs away, one sentence with its mend each.

    `metrics` of the step: `entropy` (nats a token), `tokens_per_rollout`, `kl_ref` (nats a token, with a KL term);
    `rewards`: mean rewards of its groups by kind of task ('' for all). `finite`: whether its loss and gradient were;
    None when there was no update.
    """
    if finite is not None:
        state.not_finite = 0 if finite else state.not_finite + 1
    found = []
    if settings.not_finite and state.not_finite >= settings.not_finite:
        found.append(
            f"{state.not_finite} updates in a row had a loss or gradient that is not finite: lower trainer.lr or "
            "trainer.grad_clip, and go on from a checkpoint before them"
        )
    for name, key, low, high, mends in (
        ("entropy", "entropy", settings.entropy_low, settings.entropy_high, ENTROPY),
        ("tokens sampled per rollout", "tokens_per_rollout", settings.length_low, settings.length_high, LENGTH),
    ):
        pair = _windows(state, key, metrics.get(key), settings.window)
        if pair is None or pair[0] <= 0:
            continue
        share = pair[1] / pair[0]
        if (low and share < low) or (high and share > high):
            found.append(
                f"{name} went from {pair[0]:.3g} to {pair[1]:.3g}, {share:.2g} times what it was: "
                f"{mends[0] if share < 1 else mends[1]}"
            )
    kl = _windows(state, "kl_ref", metrics.get("kl_ref"), settings.window)
    if kl is not None and settings.kl_high and kl[1] > settings.kl_high:
        found.append(f"the KL to the starting model is {kl[1]:.3g} nats a token: raise algorithm.kl, lower trainer.lr")
    for kind, values in rewards.items():
        found += _fallen(state, kind, values, settings)
    return found


def watch_evaluation(state: GuardState, settings: Guard, rewards: Mapping[str, tuple[float, int]]) -> list[str]:
    """Take note of an evaluation, (mean reward, number of tasks) by kind ('' for all); returns what has fallen.

    A fall counts from the best evaluation on, if it is beyond `validation_drop` and 3 standard errors of a difference
    of two means of n rewards between 0 and 1: sqrt(2 p (1 - p) / n), with p the mean of both.
    """
    found = []
    for kind, (mean, tasks) in rewards.items():
        best = state.best[kind] = max(mean, state.best.get(kind, mean))
        share = min(max((best + mean) / 2, 0.0), 1.0)
        error = math.sqrt(2 * share * (1 - share) / tasks) if tasks else math.inf
        if settings.validation_drop and best - mean >= max(settings.validation_drop, 3 * error):
            whose = f"of tasks of kind {kind!r} " if kind else ""
            found.append(
                f"the validation reward {whose}fell from {best:.2f} to {mean:.2f}: go on from an earlier checkpoint "
                "with a lower trainer.lr, trainer.lr_schedule or algorithm.kl, and more groups a step"
            )
    return found


ENTROPY = (
    "the policy says the same whatever it is asked; lower trainer.lr, or add algorithm.entropy or algorithm.kl",
    "the policy has lost its language; lower trainer.lr, or add algorithm.kl",
)
LENGTH = (
    "replies end early; look at some with `aglite show`, lower trainer.lr or add algorithm.kl",
    "replies do not end; look at some with `aglite show`, lower trainer.lr, or let the grader mind the length",
)


def _windows(state: GuardState, key: str, value: float | None, window: int) -> tuple[float, float] | None:
    """Means of a measure's first and last window, as soon as they do not overlap."""
    if value is None or not math.isfinite(value):
        return None
    first = state.first.setdefault(key, [])
    if len(first) < window:
        first.append(value)
        return None
    last = state.last.setdefault(key, [])
    last.append(value)
    del last[:-window]
    return (statistics.fmean(first), statistics.fmean(last)) if len(last) == window else None


def _fallen(state: GuardState, kind: str, values: Sequence[float], settings: Guard) -> list[str]:
    """Whether the mean reward of a kind of task has fallen in the last `reward_window` groups.

    They are compared with up to seven times as many groups before them. Groups differ, so a fall counts only if it is
    beyond `SIGMAS` standard errors, s sqrt(1/n + 1/m), with the s of all of these n + m groups: a fall is part of what
    it has to stand out from, and few groups are never enough.
    """
    if not settings.reward_drop:
        return []
    window = settings.reward_window
    seen = state.last.setdefault(f"reward:{kind}", [])
    seen += values
    del seen[: -8 * window]
    before, now = seen[:-window], seen[-window:]
    if len(before) < window:
        return []
    was, mean = statistics.fmean(before), statistics.fmean(now)
    error = statistics.stdev(seen) * math.sqrt(1 / len(before) + 1 / window)
    if was - mean < max(settings.reward_drop, SIGMAS * error):
        return []
    whose = f"the reward of tasks of kind {kind!r}" if kind else "the reward"
    return [
        f"{whose} fell from {was:.2f} to {mean:.2f} in the last {window} groups: look at some with `aglite show`, and "
        "go on from an earlier checkpoint with a lower trainer.lr, trainer.lr_schedule or algorithm.kl"
    ]
