"""What becomes of a rollout: from what happened to a state, a cause and flags. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from aglite.config import Limits
from aglite.rollouts.causes import Cause
from aglite.rollouts.process import Exit
from aglite.units import signal_name

if TYPE_CHECKING:
    from aglite.rollouts.grading import Grade

State = Literal["done", "failed", "error", "cancelled"]
STATE_OF: Mapping[str, State] = {"policy": "failed", "infrastructure": "error", "cancelled": "cancelled"}

SESSION_LIMITS = ("calls", "sampled_tokens", "request_bytes")
NO_MEMORY = ("MemoryError", "Cannot allocate memory", "bad_alloc", "out of memory")
"""How programs say that an allocation failed, in their last line."""


@dataclass(slots=True)
class Outcome:
    """How a rollout ended.

    `done`: the agent exited with 0. `failed`: it did not, by its own fault; there is a reward all the same.
    `error`: the infrastructure failed. `cancelled`: it was killed, or the run was stopped. These two have no reward.
    """

    state: State
    cause: str
    reward: float | None
    breakdown: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    attempt: int = 0


@dataclass(slots=True)
class Ended:
    """How one attempt ended."""

    cause: Cause | None = None
    exit_code: int | None = None
    flags: list[str] = field(default_factory=list)
    limits_hit: list[str] = field(default_factory=list)
    grade: Grade | None = None


def cause_of(
    exit: Exit,
    *,
    limits: Limits,
    out_of_time: bool,
    limits_hit: Collection[str],
    infra_error: str | None,
    last_line: str,
    quote: bool = True,
) -> Cause | None:
    """Why an attempt that ran to its end did not end well; None if it did. `quote`: with the agent's last line.

    An error of ours in its last call comes first: what the agent made of it says nothing about the agent.
    """
    how = _describe(exit, last_line if quote else "")
    if exit.cause and exit.cause.kind == "infrastructure":
        return exit.cause
    if infra_error:
        return Cause("engine", infra_error)
    if out_of_time:
        return Cause("wall_time", f"{limits.wall_s:g} s")
    if exit.cause:
        return exit.cause
    if exit.code == 0:
        return None
    for name in SESSION_LIMITS:
        if name in limits_hit:
            return Cause(name, f"{getattr(limits, name)}; then {how}")
    if exit.peak_rss_mb > 0.9 * limits.memory_mb or any(text in last_line for text in NO_MEMORY):
        return Cause("memory", f"limit {limits.memory_mb} MB; {how}")
    if exit.code < 0:
        return Cause("signal", signal_name(-exit.code))
    return Cause("exit", how)


def _describe(exit: Exit, last_line: str) -> str:
    how = f"code {exit.code}" if exit.code >= 0 else signal_name(-exit.code)
    return f"{how}: {last_line}" if last_line else how


def flags_of(*, calls: int, limits_hit: Collection[str], log_cut: bool, stragglers: bool) -> list[str]:
    """What is worth knowing about an attempt besides its end, also when it ended well."""
    flags = [f"limit:{name}" for name in sorted(limits_hit)]
    if calls == 0:
        flags.append("no_calls")
    if log_cut:
        flags.append("log_cut")
    if stragglers:
        flags.append("stragglers")
    return flags
