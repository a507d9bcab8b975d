"""What the control API takes and gives, for its OpenAPI document. Answers are documented by these, not checked against
them when they are sent; a test does that."""

from aglite.control.shapes.base import State
from aglite.control.shapes.rollouts import Rollout, RolloutDetail, TokenSample
from aglite.control.shapes.run import RecipeKey, Sandbox, Status, Step
from aglite.control.shapes.wishes import (
    Concurrency,
    ConcurrencyRequest,
    EndedRollout,
    FinishedRollout,
    Health,
    NewRollout,
    OpenedRollout,
    Problem,
    Quarantined,
    RolloutState,
    StopRequest,
    Wish,
)

__all__ = [
    "Concurrency",
    "ConcurrencyRequest",
    "EndedRollout",
    "FinishedRollout",
    "Health",
    "NewRollout",
    "OpenedRollout",
    "Problem",
    "Quarantined",
    "RecipeKey",
    "Rollout",
    "RolloutDetail",
    "RolloutState",
    "Sandbox",
    "State",
    "Status",
    "Step",
    "StopRequest",
    "TokenSample",
    "Wish",
]
