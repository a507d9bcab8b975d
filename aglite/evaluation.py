"""Evaluation: the same held-out tasks with the same seeds, whatever policy is in force."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from typing import Any

from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.rollouts.launcher import Launcher
from aglite.store import Store
from aglite.training.groups import Groups
from aglite.training.metrics import mean_interval
from aglite.training.scores import ks_of, pass_at

SEEDS_PER_TASK = 1000
"""Distance between the seeds of two tasks, so that their repetitions never share one."""


class Evaluation:
    """One pass over the validation tasks. `done` and `of` say how far it is."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        recipe: Recipe,
        tasks: list[dict[str, Any]],
        ks: list[int] | None = None,
    ) -> None:
        """`ks`: the k of pass@k to tell; by default 1, 2, 4, ... up to the rollouts of each task."""
        self._store = store
        self._launcher = launcher
        self._recipe = recipe
        self._tasks = tasks[: recipe.evaluation.tasks]
        self._ks = ks or ks_of(recipe.evaluation.rollouts_per_task)
        self.groups = Groups(store, launcher, recipe, smallest=1)
        self.of = len(self._tasks) * recipe.evaluation.rollouts_per_task

    @property
    def done(self) -> int:
        finished = [*self.groups.complete, *self.groups.open.values()]
        return sum(outcome is not None for group in finished for outcome in group.members.values())

    async def run(self, *, step: int, version: int, split: str = "val") -> dict[str, Any]:
        """Evaluate policy `version` and write the result down. Raises AgliteError when rollouts keep failing.

        The result has `mean`, `stderr` and 95% interval (`low`, `high`) of the reward over its `n` tasks (each's mean),
        `pass@k` likewise for each k, `solved` (the share of rollouts that solve their task), `lost` (tasks that could
        not be graded), `rollouts_per_task` and `by_kind` (means by the tasks' public field `kind`, where there is one).
        """
        each = self._recipe.evaluation.rollouts_per_task
        base = self._recipe.sampling.val.seed
        if each > 1 and self._recipe.sampling.val.temperature == 0:
            await self._store.add_event(
                "warning",
                "evaluation",
                f"sampling.val.temperature is 0 (greedy): all {each} rollouts of a task sample the same, and pass@k "
                "says nothing that pass@1 does not; set it above 0",
            )
        eval_id = await self._store.start_evaluation(step, version, split)
        try:
            for index, task in enumerate(self._tasks):
                seed = None if base is None else base * 1_000_003 + index * SEEDS_PER_TASK
                await self.groups.start(task, split, each, version=version, eval_id=eval_id, seed=seed)
            while not self.groups.failure and self.groups.open:
                self.groups.changed.clear()
                await self.groups.changed.wait()
            if self.groups.failure:
                raise self.groups.failure
        except (AgliteError, asyncio.CancelledError):
            self.groups.stopping = True
            await self._store.finish_evaluation(eval_id, "abandoned", {})
            raise
        result = self._summary()
        await self._store.finish_evaluation(eval_id, "done", result)
        return result

    @property
    def rewards(self) -> dict[str, list[float]]:
        """The rewards of each task that could be graded, by its id."""
        return {group.task_id: group.rewards() for group in self.groups.complete}

    def _summary(self) -> dict[str, Any]:
        means: list[float] = []
        rewards: list[float] = []
        kinds: dict[str, list[float]] = defaultdict(list)
        for group in self.groups.complete:
            mean = statistics.fmean(group.rewards())
            means.append(mean)
            rewards += group.rewards()
            if "kind" in group.task["public"]:
                kinds[str(group.task["public"]["kind"])].append(mean)
        solved_at = self._recipe.evaluation.solved_at
        return {
            **mean_interval(means),
            "solved": sum(reward >= solved_at for reward in rewards) / len(rewards) if rewards else 0.0,
            **pass_at(self.rewards.values(), self._ks, solved_at),
            "lost": self.groups.dropped,
            "rollouts_per_task": self._recipe.evaluation.rollouts_per_task,
            "by_kind": {kind: statistics.fmean(values) for kind, values in sorted(kinds.items())},
        }
