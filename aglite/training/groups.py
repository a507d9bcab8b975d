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

ERRORS_IN_A_ROW = 8
"""So many (and at least a group of them), over at least two tasks, are no matter of single tasks; three times as many
of one task are not either."""


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
    seeds: dict[str, int] = field(default_factory=dict)
    """Of members whose sampling is repeatable."""
    settling: bool = False
    """It is finished, and that is being written down."""

    @property
    def task_id(self) -> str:
        return str(self.task["id"])

    @property
    def finished(self) -> bool:
        return len(self.members) >= self.size and all(outcome is not None for outcome in self.members.values())

    def graded(self) -> list[GradedRollout]:
        """Its rollouts as the trainer takes them; those that were never graded have reward None."""
        return [
            GradedRollout(rollout_id, self.task_id, outcome.reward if outcome else None)
            for rollout_id, outcome in self.members.items()
        ]

    def rewards(self) -> list[float]:
        return [outcome.reward for outcome in self.members.values() if outcome and outcome.reward is not None]

    @property
    def equal(self) -> bool:
        """Whether all rewards are equal, so that nobody in the group has an advantage."""
        return len(set(self.rewards())) < 2


@dataclass(slots=True)
class StepGroups:
    """The complete groups of one step: those that it trains, and those of equal rewards that others took the place of
    (`algorithm.dynamic_sampling`)."""

    trained: list[Group]
    set_aside: list[Group] = field(default_factory=list)

    @property
    def all(self) -> list[Group]:
        return [*self.trained, *self.set_aside]


class Groups:
    """The groups of one purpose (training, or one evaluation).

    `changed` is set whenever a group completes, is dropped, or `failure` is set. A group that infrastructure left with
    fewer than `smallest` graded rollouts is dropped and counted. When too many rollouts in a row end in an
    infrastructure error, `failure` holds an error that says which, and no more are worth starting: what may pass, the
    launcher waits for, so this is a recipe that cannot work.
    """

    def __init__(self, store: Store, launcher: Launcher | None, recipe: Recipe, *, smallest: int) -> None:
        self._store = store
        self._launcher = launcher
        self._recipe = recipe
        self._smallest = smallest
        self._enough_errors = max(ERRORS_IN_A_ROW, recipe.algorithm.group_size)
        self._errors: list[str] = []
        """The tasks of the rollouts that ended in an error, since the last one that did not."""
        self._followers: set[asyncio.Task[None]] = set()
        self.open: dict[str, Group] = {}
        self.complete: deque[Group] = deque()
        self.set_aside: list[Group] = []
        """Complete groups of equal rewards that the next step passes over (`algorithm.dynamic_sampling`)."""
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
            killed = member["state"] == "cancelled" and member["cause"].startswith(("killed", "quarantined"))
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

    async def retry(self, rollout_id: str) -> bool:
        """Launch a rollout that ended without success again, as a new attempt; False if no open group here has it.

        What it got so far no longer counts. Raises AgliteError while it runs, and when it went well.
        """
        group = next((group for group in self.open.values() if rollout_id in group.members), None)
        if group is None or group.settling:
            return False
        outcome = group.members[rollout_id]
        if outcome is None or outcome.state == "done":
            state = "still running or about to" if outcome is None else "done"
            raise AgliteError(
                f"rollout {rollout_id} is {state}", "only one that failed or was cancelled can be retried"
            )
        group.members[rollout_id] = None  # before anything is waited for: the group must not complete without it
        await self._store.set_rollout_state(
            rollout_id, "queued", "retry asked for", reward=None, breakdown={}, flags=[], exit_code=None
        )
        self._launch(group, rollout_id, group.seeds.get(rollout_id))
        return True

    async def quarantine(self, rollout_id: str) -> bool:
        """Take a rollout out of its group, and end it if it runs: it is not trained and has no place in the baseline.
        False if no group here that is still to be trained has it."""
        group = next((each for each in self._untrained() if rollout_id in each.members), None)
        if group is None:
            return False
        outcome = group.members[rollout_id]
        if outcome is None:
            return self._launcher is not None and self._launcher.kill(rollout_id, "quarantined")
        group.members[rollout_id] = Outcome("cancelled", "quarantined", None, attempt=outcome.attempt)
        await self._store.set_rollout_state(rollout_id, "cancelled", "quarantined", reward=None, breakdown={})
        for waiting in (self.complete, self.set_aside):
            if group in waiting and len(group.rewards()) < self._smallest:
                waiting.remove(group)
                await self._drop(group)
        return True

    def _untrained(self) -> list[Group]:
        return [*self.open.values(), *self.set_aside, *self.complete]

    async def quarantine_task(self, task_id: str) -> int:
        """Take all rollouts of a task out of the groups that are still to be trained; returns how many."""
        members = [id for group in self._untrained() if group.task_id == task_id for id in group.members]
        return sum([await self.quarantine(rollout_id) for rollout_id in members])

    async def _add_member(self, group: Group, seed: int | None) -> None:
        rollout_id = new_id("r")
        group.members[rollout_id] = None  # before anything is waited for: the group must not complete without it
        await self._store.add_rollout(rollout_id, group.task_id, group.id, group.split, self._recipe.agent.backend)
        self._launch(group, rollout_id, seed)

    def _launch(self, group: Group, rollout_id: str, seed: int | None) -> None:
        assert self._launcher is not None, "external rollouts are launched elsewhere"
        group.members[rollout_id] = None
        if seed is not None:
            group.seeds[rollout_id] = seed
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
            self._errors.append(group.task_id)
            count = len(self._errors)
            if count >= self._enough_errors * (1 if len(set(self._errors)) > 1 else 3):
                self._fail(
                    AgliteError(
                        f"the last {count} rollouts all failed by infrastructure: {outcome.cause}",
                        f"see `aglite show {rollout_id}` and `aglite logs {rollout_id}`; then start again: it goes on",
                    )
                )
                return
            if group.refills < self._recipe.algorithm.max_refills:
                group.refills += 1
                await self._add_member(group, None)
                await self._store.update_group(group.id, refills=group.refills)
        else:
            self._errors.clear()
        await self._settle(group)

    async def _settle(self, group: Group) -> None:
        """Put a finished group where it belongs. It is open until that is written: whoever sees none open may count."""
        if not group.finished or group.settling or group.id not in self.open:
            return
        group.settling = True
        if len(group.rewards()) < self._smallest:
            await self._drop(group)
        else:
            await self._store.update_group(group.id, state="complete", finished_at=time.time())
            del self.open[group.id]
            self.complete.append(group)
            if len(group.rewards()) < group.size:
                await self._store.add_event(
                    "warning",
                    "rollout",
                    f"group {group.id} of task {group.task_id} goes on with {len(group.rewards())} of {group.size} "
                    "rollouts: the others could not be graded",
                    {"group": group.id},
                )
        self.changed.set()

    def take(self, wanted: int) -> StepGroups | None:
        """The groups of the next step, or None while there are too few.

        The oldest complete groups come first; as many as `algorithm.dynamic_sampling` of those whose rewards are all
        equal are set aside, and wait for the step that they were passed over for.
        """
        taken = 0
        while taken < min(wanted, len(self.complete)):
            if self.complete[taken].equal and len(self.set_aside) < self._recipe.algorithm.dynamic_sampling:
                self.set_aside.append(self.complete[taken])
                del self.complete[taken]
            else:
                taken += 1
        if taken < wanted:
            return None
        set_aside, self.set_aside = self.set_aside, []
        return StepGroups([self.complete.popleft() for _ in range(wanted)], set_aside)

    async def _drop(self, group: Group) -> None:
        await self._store.update_group(group.id, state="dropped", finished_at=time.time())
        self.open.pop(group.id, None)
        self.dropped += 1
        await self._store.add_event(
            "warning",
            "rollout",
            f"group {group.id} of task {group.task_id} is dropped: too few of its rollouts could be graded",
            {"group": group.id},
        )
        self.changed.set()

    async def drain(self) -> None:
        """Wait until every follower has written its rollout's end (after the launcher was stopped)."""
        while self._followers:
            await asyncio.wait(self._followers)
