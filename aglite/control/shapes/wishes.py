"""What is sent to the control API, and the short answers to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from aglite.control.shapes.base import Shape, State


class NewRollout(Shape):
    """A rollout that somebody else launches."""

    task: dict[str, Any]
    """The public part of a task, or a whole row with `id`, `public` and `hidden`."""
    split: Literal["train", "val"] = "train"
    group: str | None = None
    """Rollouts of one group share a baseline."""


class FinishedRollout(Shape):
    """How it ended: a reward, or an infrastructure error."""

    reward: float | None = None
    breakdown: dict[str, FiniteFloat] = Field({})
    error: str | None = None


class StopRequest(Shape):
    now: bool = False
    """Without waiting for an update or a checkpoint."""
    after_step: bool = False
    """Not before the next step is trained."""


class ConcurrencyRequest(Shape):
    rollouts: Annotated[int, Field(ge=1, le=4096)]
    """How many may run at once."""


# what it answers


class Problem(Shape):
    """Why a request cannot be answered."""

    detail: str
    mend: str = ""
    """What to do about it."""


class Health(Shape):
    status: Literal["ok"]


class Wish(Shape):
    """A wish that was noted; the status and the events show what follows."""

    state: str


class RolloutState(Shape):
    state: State


class Concurrency(Shape):
    concurrency: int


class Quarantined(Shape):
    rollouts: int
    """How many rollouts of the task were taken out of the training."""


class OpenedRollout(Shape):
    rollout_id: str
    token: str
    """Bearer token of the model routes, dead once the rollout is finished."""
    base_url: str
    """The prefix that `/v1/...` is appended to."""


class EndedRollout(Shape):
    rollout_id: str
    state: Literal["done", "error"]
