"""What a run is about to do next, as far as a checkpoint must hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from aglite.training.guard import GuardState


@dataclass(slots=True)
class LoopState:
    """What a checkpoint must hold, besides weights and optimizer, for the run to go on exactly."""

    step: int = 0
    version: int = 0
    cursor: int = 0
    """Places in the order of tasks passed so far; the order of each epoch follows from the recipe's seed."""
    baseline: float | None = None
    open_groups: list[str] = field(default_factory=list)
    """Groups started but not trained when the checkpoint was written."""
    evaluated: int = -1
    """The last step that was evaluated."""
    streaks: dict[str, int] = field(default_factory=dict)
    """By task: how many groups in a row solved it, or (negative) did not and had equal rewards."""
    resting: dict[str, int] = field(default_factory=dict)
    """By task: the last epoch that it sits out."""
    guard: GuardState = field(default_factory=GuardState)

    def __post_init__(self) -> None:
        if isinstance(self.guard, dict):  # as a checkpoint has it
            self.guard = GuardState(**self.guard)
