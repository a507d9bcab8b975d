"""Why a rollout ended other than well: a closed list, split into whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aglite.units import encodable

Kind = Literal["policy", "infrastructure", "cancelled"]

CAUSES: dict[str, tuple[Kind, bool]] = {
    # code: (whose it is, whether another attempt can help)
    "exit": ("policy", False),  # the agent ended with a non-zero exit code
    "signal": ("policy", False),  # the agent was ended by a signal that aglite did not send
    "wall_time": ("policy", False),  # agent.limits.wall_s
    "calls": ("policy", False),  # agent.limits.calls, and the agent did not end well
    "sampled_tokens": ("policy", False),  # agent.limits.sampled_tokens, and the agent did not end well
    "request_bytes": ("policy", False),  # agent.limits.request_bytes, and the agent did not end well
    "memory": ("policy", False),  # agent.limits.memory_mb
    "disk": ("policy", False),  # the agent filled the disk that it was given
    "flagged": ("policy", False),  # one of the recipe's reward.on_flag that says `fail`
    "engine": ("infrastructure", True),  # the agent's last call ended in an error of ours
    "launch": ("infrastructure", True),  # the machine could not start the agent (processes, memory, disk)
    "image": ("infrastructure", True),  # the agent's image is not there, or cannot be had at the moment
    "backend": ("infrastructure", True),  # Docker or Kubernetes does not answer, or refuses
    "lost": ("infrastructure", True),  # the agent's container, node or files went away, or it was evicted for others
    "grader": ("infrastructure", False),  # raised, hung or gave no number, twice; the agent's work is not to blame
    "recipe": ("infrastructure", False),  # the recipe names something that is not there
    "killed": ("cancelled", False),  # `kill` of this rollout
    "quarantined": ("cancelled", False),  # `quarantine` of this rollout or its task
    "stopped": ("cancelled", False),  # the run was stopped
}


@dataclass(frozen=True, slots=True)
class Cause:
    """One of CAUSES with what happened in particular. As text, the way the store has it: `code: detail`."""

    code: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.code not in CAUSES:
            raise ValueError(f"no cause {self.code!r}")

    @property
    def kind(self) -> Kind:
        return CAUSES[self.code][0]

    @property
    def retryable(self) -> bool:
        return CAUSES[self.code][1]

    def __str__(self) -> str:
        return encodable(f"{self.code}: {self.detail}") if self.detail else self.code


class BackendError(Exception):
    """A backend could not start an agent, or lost it. `cause` says what happened."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(str(cause))
        self.cause = cause


def kind_of(cause: str) -> Kind | None:
    """The kind of a cause as the store has it; None for '' and for text that is no cause."""
    known = CAUSES.get(cause.partition(":")[0])
    return known[0] if known else None
