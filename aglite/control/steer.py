"""The routes that change how a run goes on: an early end of a drain, concurrency, quarantine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from aglite.control import shapes
from aglite.steering import Steering

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor


def add_steering(app: FastAPI, supervisor: Supervisor, route: Callable[..., dict[str, Any]]) -> None:
    """Add them to `app`; `route` says what a route answers."""
    steering = Steering(supervisor)

    @app.post("/api/preempt", **route(shapes.Wish, 409, tag="steering"))
    async def preempt() -> Any:
        """End a drain: what is being sampled stops at its next token."""
        return supervisor.ask("preempt")

    @app.post("/api/concurrency", **route(shapes.Concurrency, 409, tag="steering"))
    async def set_concurrency(body: shapes.ConcurrencyRequest) -> Any:
        """Run that many rollouts at once, until the supervisor is started again. None that runs is ended."""
        await steering.set_concurrency(body.rollouts)
        return {"concurrency": body.rollouts}

    @app.post("/api/rollouts/{rollout_id}/quarantine", **route(shapes.RolloutState, 404, 409, tag="steering"))
    async def quarantine_rollout(rollout_id: str) -> Any:
        """Leave one that was not trained yet out of the training and of its group's baseline."""
        await steering.quarantine(rollout_id)
        return {"state": "cancelled"}

    @app.post("/api/tasks/{task_id:path}/quarantine", **route(shapes.Quarantined, 409, tag="steering"))
    async def quarantine_task(task_id: str) -> Any:
        """Leave a training task out from now on, and its rollouts out of the training."""
        return {"rollouts": await steering.quarantine_task(task_id)}

    @app.post("/api/tasks/{task_id:path}/release", **route(shapes.Wish, 409, tag="steering"))
    async def release_task(task_id: str) -> Any:
        """Take a task again that was left out."""
        await steering.release_task(task_id)
        return {"state": "released"}
