"""Groups in flight: start their rollouts, refill what infrastructure lost, and hand over the complete ones."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.paths import new_id
from aglite.rollouts.launcher import Launcher, Outcome
from aglite.store import Store
from aglite.training.batch import GradedRollout


@dataclass(slots=True)
class Group:
    """The rollouts of one task that share a baseline. A member's outcome is None while it runs."""

    id: str
    task: dict[str, Any]
    split: str
    size: int
    version: int
    eval_id: int | None = None
    refills: int = 0
    members: dict[str, Outcome | None] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        return str(self.task["id"])

    @property
    def finished(self) -> bool:
        return all(outcome is not None for outcome in self.members.values())

    def graded(self) -> list[GradedRollout]:
        """Its rollouts as the trainer takes them; those that were never graded have reward None."""
        return [
            GradedRollout(rollout_id, self.task_id, outcome.reward if outcome else None)
            for rollout_id, outcome in self.members.items()
        ]

    def rewards(self) -> list[float]:
        return [outcome.reward for outcome in self.members.values() if outcome and outcome.reward is not None]


class Groups:
    """The groups of one purpose (training, or one evaluation).

    `changed` is set whenever a group completes, is dropped, or `failure` is set. A group that infrastructure left with
    fewer than `smallest` graded rollouts is dropped and counted. When `breaker` rollouts in a row end in an
    infrastructure error, `failure` holds an error that says which, and no more are worth starting.
    """

    def __init__(self, store: Store, launcher: Launcher | None, recipe: Recipe, *, smallest: int) -> None:
        self._store = store
        self._launcher = launcher
        self._recipe = recipe
        self._smallest = smallest
        self._breaker = max(8, recipe.algorithm.group_size)
        self._errors_in_a_row = 0
        self._followers: set[asyncio.Task[None]] = set()
        self.open: dict[str, Group] = {}
        self.complete: deque[Group] = deque()
        self.dropped = 0
        self.changed = asyncio.Event()
        self.failure: AgliteError | None = None
        self.stopping = False

    async def start(
        self,
        task: dict[str, Any],
        split: str,
        size: int,
        *,
        version: int,
        eval_id: int | None = None,
        seed: int | None = None,
    ) -> Group:
        """Begin a new group. With `seed`, member k samples with seed + k."""
        group = Group(new_id("g"), task, split, size, version, eval_id)
        await self._store.add_group(group.id, group.task_id, split, size, eval_id=eval_id, created_version=version)
        self.open[group.id] = group
        for index in range(size):
            await self._add_member(group, None if seed is None else seed + index)
        return group

    async def restore(self, row: dict[str, Any], task: dict[str, Any]) -> Group:
        """Take up a group of an earlier process: its graded rollouts count, the others run as new attempts, and those
        that were rolled back are replaced."""
        group = Group(
            row["id"], task, row["split"], row["size"], row["created_version"], row["eval_id"], row["refills"]
        )
        self.open[group.id] = group
        for member in self._store.group_rollouts(group.id):
            if member["fate"] == "rolled_back":
                continue
            killed = member["state"] == "cancelled" and member["cause"].startswith("killed")
            if member["state"] in ("done", "failed", "error") or killed:
                group.members[member["id"]] = Outcome(
                    state=member["state"],
                    cause=member["cause"],
                    reward=member["reward"],
                    breakdown=member["breakdown"],
                    flags=member["flags"],
                    attempt=member["attempt"],
                )
            else:
                self._launch(group, member["id"], None)
        errors = sum(outcome is not None and outcome.state == "error" for outcome in group.members.values())
        wanted = group.size + min(errors, self._recipe.algorithm.max_refills)
        for _ in range(wanted - len(group.members)):
            await self._add_member(group, None)
        await self._settle(group)
        return group

    async def _add_member(self, group: Group, seed: int | None) -> None:
        rollout_id = new_id("r")
        await self._store.add_rollout(rollout_id, group.task_id, group.id, group.split, self._recipe.agent.backend)
        self._launch(group, rollout_id, seed)

    def _launch(self, group: Group, rollout_id: str, seed: int | None) -> None:
        assert self._launcher is not None, "external rollouts are launched elsewhere"
        group.members[rollout_id] = None
        outcome = self._launcher.submit(rollout_id, group.task, group.split, seed)
        follower = asyncio.create_task(self._follow(group, rollout_id, outcome))
        self._followers.add(follower)
        follower.add_done_callback(self._follower_done)

    def _follower_done(self, follower: asyncio.Task[None]) -> None:
        self._followers.discard(follower)
        if not follower.cancelled() and (error := follower.exception()) is not None:
            self._fail(
                error if isinstance(error, AgliteError) else AgliteError(f"a rollout's bookkeeping failed: {error!r}")
            )

    def _fail(self, error: AgliteError) -> None:
        self.failure = self.failure or error
        self.changed.set()

    async def _follow(self, group: Group, rollout_id: str, task: asyncio.Task[Outcome]) -> None:
        outcome = await task
        ended_with_run = outcome.state == "cancelled" and outcome.cause.startswith("stopped")
        if ended_with_run or (self.stopping and outcome.reward is None):
            return  # stays unfinished, to be taken up by the next process
        group.members[rollout_id] = outcome
        if outcome.state == "error":
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= self._breaker:
                self._fail(
                    AgliteError(
                        f"the last {self._errors_in_a_row} rollouts all failed by infrastructure: {outcome.cause}",
                        f"see `aglite show {rollout_id}` and `aglite logs {rollout_id}`; then start again: it goes on",
                    )
                )
                return
            if group.refills < self._recipe.algorithm.max_refills:
                group.refills += 1
                await self._store.update_group(group.id, refills=group.refills)
                await self._add_member(group, None)
        else:
            self._errors_in_a_row = 0
        await self._settle(group)

    async def _settle(self, group: Group) -> None:
        if not group.finished or group.id not in self.open:
            return
        del self.open[group.id]
        if len(group.rewards()) < self._smallest:
            self.dropped += 1
            await self._store.update_group(group.id, state="dropped", finished_at=time.time())
            await self._store.add_event(
                "warning",
                "rollout",
                f"group {group.id} of task {group.task_id} is dropped: too few of its rollouts could be graded",
                {"group": group.id},
            )
        else:
            await self._store.update_group(group.id, state="complete", finished_at=time.time())
            self.complete.append(group)
        self.changed.set()

    async def drain(self) -> None:
        """Wait until every follower has written its rollout's end (after the launcher was stopped)."""
        while self._followers:
            await asyncio.wait(self._followers)
