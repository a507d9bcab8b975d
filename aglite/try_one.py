"""`aglite run`: one rollout of one task, told in full, for writing a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aglite.blocking import abandonable
from aglite.cli.show import page
from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.paths import RunDir, new_id
from aglite.show import rollout_detail
from aglite.supervisor import Supervisor
from aglite.tasks import load_tasks


def try_one(
    recipe: Recipe,
    task_id: str,
    *,
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> int:
    """`aglite run`: one rollout of one task, told in full; returns 0 if it was graded."""
    return TryOne(recipe, run_dir or RunDir(Path("runs") / f"{recipe.name}.try"), on_line, task_id).run()


class TryOne(Supervisor):
    """Runs one rollout without training, for writing a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDir,
        on_line: Callable[[str], None],
        task_id: str,
    ) -> None:
        recipe = recipe.model_copy(update={"agent": recipe.agent.model_copy(update={"concurrency": 1})})
        super().__init__(recipe, run_dir, on_line)
        self._task_id = task_id

    async def work(self) -> int:
        task, split = await self._find_task()
        await self.runtime.start(self.recipe.model, trainer=False)
        await self.keep_to_retention()
        await self.phases.set("rollout", f"task {self._task_id}")
        group, rollout_id = new_id("g"), new_id("r")
        await self.store.add_tasks(split, [task])
        await self.store.add_group(group, task["id"], split, 1)
        await self.store.add_rollout(rollout_id, task["id"], group, split, self.recipe.agent.backend)
        outcome = await self.runtime.own_launcher().submit(rollout_id, task, split)
        detail = rollout_detail(self.store, self.run_dir, rollout_id)
        for text in page(detail, tokens=False):
            self.on_line(text)
        if detail["log_tail"].strip():
            self.on_line("\nthe agent's output:")
            self.on_line(detail["log_tail"].rstrip())
        await self.store.update_group(group, state="complete")
        return 0 if outcome.reward is not None else 1

    async def _find_task(self) -> tuple[dict[str, Any], str]:
        for split in ("train", "val"):
            rows = await abandonable(load_tasks, getattr(self.recipe.tasks, split), self.recipe.folder, split)
            for row in rows:
                if row["id"] == self._task_id:
                    return row, split
        raise AgliteError(f"no task {self._task_id} in {self.recipe.name}", f"one of its tasks is {rows[0]['id']}")
