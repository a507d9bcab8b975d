"""External rollouts: agents that somebody else launches, recorded like all others, trained on if the recipe says so."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import TYPE_CHECKING, Any

from aglite.errors import AgliteError
from aglite.paths import new_id
from aglite.rollouts.launcher import Outcome
from aglite.tasks import FORM, problem_of
from aglite.training.groups import Group

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor


class External:
    """Opens and finishes external rollouts. Those with the same `group` share a baseline; a training group is complete
    when `group_size` of its rollouts are finished (with `reinforce`, each rollout at once)."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._running: dict[str, Group] = {}
        self._groups: dict[str, Group] = {}
        self._opening = asyncio.Lock()
        self._stopped_with_runtime = False

    @property
    def _trains(self) -> bool:
        return self._supervisor.loop is not None and self._supervisor.recipe.agent.backend == "external"

    async def open(self, task: dict[str, Any], split: str, group_name: str | None) -> dict[str, Any]:
        """A new rollout on `task` (its public part, or a whole row with `id`): its id, bearer token and base URL."""
        supervisor = self._supervisor
        runtime, store, recipe = supervisor.runtime, supervisor.store, supervisor.recipe
        if not runtime.ready:
            raise AgliteError("the model is still loading", "try again in a moment; GET /api/status says how far it is")
        row = (
            task
            if "public" in task
            else {"id": str(task.get("id", f"external-{secrets.token_hex(4)}")), "public": task}
        )
        if problem := problem_of(row):
            raise AgliteError(f"task: {problem}", FORM)
        row.setdefault("hidden", {})
        known = store.task(split, str(row["id"]))
        # one whose text is not kept cannot be told apart
        if known is not None and known["public"] and known["public"] != store.as_stored(row)["public"]:
            raise AgliteError(
                f"task: `id` {row['id']} is that of another task of this run", "give it an id of its own, or none"
            )
        async with self._opening:  # of two that name the same new group, the second finds it
            group = self._groups.get(group_name or "") or await self._new_group(row, split)
            if group_name:
                self._groups[group_name] = group
        if not self._stopped_with_runtime:
            self._stopped_with_runtime = True
            runtime.also_stop(self)
        rollout_id = new_id("r")
        await store.add_rollout(rollout_id, group.task_id, group.id, split, "external")
        sampling = recipe.sampling.train if split == "train" else recipe.sampling.val
        session = runtime.gateway.open_session(rollout_id, 1, recipe.agent.limits, sampling)
        await store.set_rollout_state(rollout_id, "running", attempt=1, started_at=time.time())
        group.members[rollout_id] = None
        self._running[rollout_id] = group
        return {"rollout_id": rollout_id, "token": session.token, "base_url": f"{runtime.public_url}{session.path}"}

    async def _new_group(self, row: dict[str, Any], split: str) -> Group:
        loop, store, algorithm = self._supervisor.loop, self._supervisor.store, self._supervisor.recipe.algorithm
        version = loop.state.version if loop else 0
        size = algorithm.group_size if self._trains and algorithm.name != "reinforce" else 1
        group = Group(new_id("g"), row, split, size, version)
        if store.task(split, group.task_id) is None:  # a recipe's own task stays as it is
            await store.add_tasks(
                split, [row if store.keep_messages else {"id": row["id"], "public": {}, "hidden": {}}]
            )
        await store.add_group(group.id, group.task_id, split, size, created_version=version)
        return group

    async def finish(
        self, rollout_id: str, reward: float | None, breakdown: dict[str, float], error: str | None
    ) -> dict[str, Any]:
        """End it with its reward, or with the error that kept it from one."""
        group = self._running.get(rollout_id)
        if group is None:
            raise AgliteError(f"no external rollout {rollout_id} is running", "open one with POST /api/rollouts")
        if (reward is None) == (error is None):
            raise AgliteError("give either `reward` or `error`", 'for example {"reward": 0.7}')
        if reward is not None and not math.isfinite(reward):
            raise AgliteError(f"reward: {reward} is not a finite number", "give a finite one")
        state, cause = ("done", "") if error is None else ("error", f"external: {error}")
        await self._end(rollout_id, Outcome(state, cause, reward, breakdown, [], 1))
        if group.finished and len(group.members) >= group.size:
            await self._complete(group)
        return {"rollout_id": rollout_id, "state": state}

    async def kill(self, rollout_id: str) -> bool:
        """Cancel it; its place in the group is free again. False if it is not running."""
        group = self._running.get(rollout_id)
        if group is None:
            return False
        await self._end(rollout_id, Outcome("cancelled", "killed", None))
        del group.members[rollout_id]
        return True

    async def stop(self) -> None:
        """Cancel what has not been finished: after the run nobody can report on it any more."""
        for rollout_id in list(self._running):
            await self._end(rollout_id, Outcome("cancelled", "stopped", None))

    async def _end(self, rollout_id: str, outcome: Outcome) -> None:
        group = self._running.pop(rollout_id)
        await self._supervisor.runtime.gateway.close_session(rollout_id)
        await self._supervisor.store.set_rollout_state(
            rollout_id,
            outcome.state,
            cause=outcome.cause,
            reward=outcome.reward,
            breakdown=outcome.breakdown,
            finished_at=time.time(),
        )
        group.members[rollout_id] = outcome

    async def _complete(self, group: Group) -> None:
        self._groups = {name: other for name, other in self._groups.items() if other is not group}
        loop = self._supervisor.loop
        enough = len(group.rewards()) >= min(2, group.size)  # fewer have no baseline, as in groups launched here
        state = "complete" if enough else "dropped"
        await self._supervisor.store.update_group(group.id, state=state, finished_at=time.time())
        if loop is not None and self._trains and group.split == "train" and enough:
            loop.groups.complete.append(group)
            loop.groups.changed.set()
