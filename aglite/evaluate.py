"""`aglite eval`: how good a model is at a recipe, without training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aglite.blocking import abandonable
from aglite.config import Recipe
from aglite.errors import AgliteError, RecipeError
from aglite.evaluation import Evaluation
from aglite.paths import RunDir
from aglite.supervisor import Supervisor
from aglite.tasks import load_tasks


def evaluate(
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    split: str = "val",
    n: int | None = None,
    ks: Sequence[int] = (),
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`aglite eval`: mean reward and pass@k of a model on a split, with 95% intervals over tasks.

    `n` rollouts of each task (by default as many as the recipe says, or as the largest k wants) and pass@k for each of
    `ks` (by default 1, 2, 4, ... and n). The result is that of `Evaluation.run` with the `model` and, by task, the
    `rewards`. Raises AgliteError when it was interrupted or rollouts keep failing, RecipeError for a k above n.
    """
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise AgliteError(
            f"no checkpoint at {checkpoint}", "give its folder, such as runs/instruct/checkpoints/step-12"
        )
    n = n or max([recipe.evaluation.rollouts_per_task, *ks])
    if ks and max(ks) > n:
        raise RecipeError(f"--k {max(ks)}: {n} rollouts of a task say nothing about pass@{max(ks)}", "raise --n")
    recipe.evaluation.rollouts_per_task = n
    supervisor = EvalSupervisor(
        recipe, run_dir or RunDir(Path("runs") / f"{recipe.name}.eval"), on_line, checkpoint, split, sorted(set(ks))
    )
    if supervisor.run() != 0 or supervisor.result is None:
        raise AgliteError("the evaluation was interrupted", "start it again")
    return supervisor.result


class EvalSupervisor(Supervisor):
    """Evaluates a model without training."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDir,
        on_line: Callable[[str], None],
        checkpoint: Path | None,
        split: str,
        ks: list[int],
    ) -> None:
        super().__init__(recipe, run_dir, on_line)
        self._checkpoint = checkpoint
        self._split = split
        self._ks = ks
        self.result: dict[str, Any] | None = None

    async def work(self) -> int:
        recipe = self.recipe
        rows = await abandonable(load_tasks, getattr(recipe.tasks, self._split), recipe.folder, self._split)
        await self.store.add_tasks(self._split, rows)
        model = str(self._checkpoint or recipe.model)
        await self.runtime.start(model, trainer=False)
        await self.keep_to_retention()
        await self.phases.set("evaluating", f"{self._split} of {recipe.name}")
        evaluation = Evaluation(self.store, self.runtime.own_launcher(), recipe, rows, self._ks)
        result = await evaluation.run(step=0, version=0, split=self._split)
        self.result = {**result, "model": model, "rewards": evaluation.rewards}
        return 0
