"""Which task is next, and which ones rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aglite.config import Tasks
from aglite.errors import AgliteError
from aglite.training.state import LoopState


class TaskOrder:
    """The order of training tasks: each epoch is a shuffle that only the seed and the epoch decide.

    A task that `tasks.rest_solved_after` groups in a row solved (every reward at least 1), or that as many as
    `tasks.rest_unsolved_after` neither solved nor differed on, sits out `tasks.rest_epochs` epochs and is then tried
    again. What a person has quarantined is passed by. All else that changes is in the LoopState.
    """

    def __init__(self, tasks: Sequence[dict[str, Any]], seed: int, settings: Tasks) -> None:
        self._tasks = tasks
        self._seed = seed
        self._settings = settings
        self._epoch, self._shuffle = -1, list[int]()
        self._ids = {str(task["id"]) for task in tasks}
        self.quarantined: set[str] = set()

    def next(self, state: LoopState) -> dict[str, Any]:
        """The next task that does not rest; where a whole epoch of them rests, the next one all the same."""
        for _ in self._tasks:
            epoch = state.cursor // len(self._tasks)
            task = self._pass(state)
            if epoch > state.resting.get(task["id"], -1) and str(task["id"]) not in self.quarantined:
                return task
        while str((task := self._pass(state))["id"]) in self.quarantined:
            pass
        return task

    def quarantine(self, task_id: str) -> None:
        """Pass `task_id` by from now on. Raises AgliteError where there is none, and for the last one left."""
        if task_id not in self._ids:
            raise AgliteError(f"there is no training task {task_id}", "see the column `task` of `aglite rollouts`")
        if self._ids <= self.quarantined | {task_id}:
            raise AgliteError(f"{task_id} is the last task that is left", "release another one first, or stop the run")
        self.quarantined.add(task_id)

    def release(self, task_id: str) -> None:
        """Take `task_id` again. Raises AgliteError where it is not quarantined."""
        if task_id not in self.quarantined:
            raise AgliteError(f"task {task_id} is not quarantined", "the status lists those that are: `quarantined`")
        self.quarantined.discard(task_id)

    def _pass(self, state: LoopState) -> dict[str, Any]:
        """The task at the cursor, which moves on."""
        state.cursor += 1
        return self._at(state.cursor - 1)

    def note(self, state: LoopState, task_id: str, rewards: Sequence[float]) -> str:
        """Take note of a group's rewards; returns why the task rests from now on, '' if it does not."""
        streak = state.streaks.get(task_id, 0)
        if min(rewards) >= 1:
            streak, word, limit = max(0, streak) + 1, "solved", self._settings.rest_solved_after
        elif max(rewards) < 1 and min(rewards) == max(rewards):
            streak, word, limit = min(0, streak) - 1, "not solved", self._settings.rest_unsolved_after
        else:
            streak, word, limit = 0, "", 0
        for table in (state.streaks, state.resting):
            table.pop(task_id, None)
        if streak:
            state.streaks[task_id] = streak
        if not limit or abs(streak) < limit:
            return ""
        epoch = max(0, state.cursor - 1) // len(self._tasks)
        state.resting[task_id] = epoch + self._settings.rest_epochs
        groups = f"{abs(streak)} groups in a row" if abs(streak) > 1 else "its last group"
        return f"{word} by every rollout of {groups}" if word == "solved" else f"{word} by any rollout of {groups}"

    def resting(self, state: LoopState) -> list[str]:
        """The tasks that rest at the moment."""
        epoch = state.cursor // len(self._tasks)
        return sorted(task for task, until in state.resting.items() if epoch <= until)

    def _at(self, cursor: int) -> dict[str, Any]:
        epoch, position = divmod(cursor, len(self._tasks))
        if epoch != self._epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._epoch, self._shuffle = epoch, order
        return self._tasks[self._shuffle[position]]
