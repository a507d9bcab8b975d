"""What a person can change while a run goes on: how many rollouts run at once, and what is left out of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aglite.errors import AgliteError

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

QUARANTINE = "quarantine"
"""The name under which the store keeps the tasks that are left out."""


class Steering:
    """Changes a run that goes on. Every method raises AgliteError where the change makes no sense now."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._store = supervisor.store

    async def set_concurrency(self, number: int) -> None:
        """Run `number` rollouts at once from now on, until this process ends."""
        self._supervisor.runtime.own_launcher().concurrency = number
        await self._store.add_event("info", "run", f"{number} rollouts at once from now on (asked for)")

    async def quarantine(self, rollout_id: str) -> None:
        """Take one rollout out of the training. Raises NotFoundError when there is none of that name."""
        row = self._store.rollout(rollout_id)
        loop = self._supervisor.loop
        if loop is None or not await loop.groups.quarantine(rollout_id):
            raise AgliteError(
                f"rollout {rollout_id} is not about to be trained: it is {row['state']}, and its group is not open",
                "only a rollout whose group was not trained yet can be quarantined",
            )
        reward = "" if row["reward"] is None else f", with reward {row['reward']:.3g}"
        text = f"{rollout_id} is quarantined: it was {row['state']}{reward}"
        await self._store.add_event("warning", "rollout", text, {"id": rollout_id})

    async def quarantine_task(self, task_id: str) -> int:
        """Leave a training task out from now on, and its rollouts out of the training; returns how many those were."""
        loop = self._loop()
        loop.order.quarantine(task_id)
        await self._store.set_meta(QUARANTINE, sorted(loop.order.quarantined))
        number = await loop.groups.quarantine_task(task_id)
        text = f"task {task_id} is quarantined, and {number} of its rollouts"
        await self._store.add_event("warning", "run", text, {"task": task_id})
        return number

    async def release_task(self, task_id: str) -> None:
        """Take a task again that was left out."""
        loop = self._loop()
        loop.order.release(task_id)
        await self._store.set_meta(QUARANTINE, sorted(loop.order.quarantined))
        await self._store.add_event("info", "run", f"task {task_id} is taken again", {"task": task_id})

    def _loop(self) -> Any:
        if self._supervisor.loop is None:
            raise AgliteError("nothing is being trained (yet)", "try again when the model is loaded")
        return self._supervisor.loop
