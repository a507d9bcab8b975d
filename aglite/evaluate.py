"""`aglite eval`: how good a model is at a recipe, without training it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aglite.blocking import abandonable
from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.evaluation import Evaluation
from aglite.models import resolve_model
from aglite.paths import RunDir
from aglite.supervisor import Supervisor
from aglite.tasks import load_tasks
from aglite.training.metrics import mean_interval, pass_at_k


def evaluate(
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    split: str = "val",
    n: int = 1,
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`aglite eval`: mean reward, pass@1 and pass@n of a model on a split, with 95% intervals over tasks.

    Raises AgliteError when it was interrupted or rollouts keep failing.
    """
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise AgliteError(
            f"no checkpoint at {checkpoint}", "give its folder, such as runs/instruct/checkpoints/step-12"
        )
    supervisor = EvalSupervisor(
        recipe, run_dir or RunDir(Path("runs") / f"{recipe.name}.eval"), on_line, checkpoint, split, n
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
        n: int,
    ) -> None:
        super().__init__(recipe, run_dir, on_line)
        self.recipe.evaluation.rollouts_per_task = n
        self._checkpoint = checkpoint
        self._split = split
        self.result: dict[str, Any] | None = None

    async def work(self) -> int:
        recipe = self.recipe
        rows = await abandonable(load_tasks, getattr(recipe.tasks, self._split), recipe.folder, self._split)
        await self.store.add_tasks(self._split, rows)
        model = str(self._checkpoint or recipe.model)
        await self.runtime.start(await abandonable(resolve_model, model, self.on_line), trainer=False)
        await self.phases.set("evaluating", f"{self._split} of {recipe.name}")
        evaluation = Evaluation(self.store, self.runtime.own_launcher(), recipe, rows)
        result = await evaluation.run(step=0, version=0, split=self._split)
        n = recipe.evaluation.rollouts_per_task
        rewards = [group.rewards() for group in evaluation.groups.complete]
        result["rewards"] = {group.task_id: group.rewards() for group in evaluation.groups.complete}
        for k in sorted({1, n}):
            values = [pass_at_k(len(each), sum(r >= 1 for r in each), k) for each in rewards if len(each) >= k]
            interval = mean_interval(values)
            # a normal interval of few tasks may reach past what a share can be
            result[f"pass@{k}"] = interval | {"low": max(0.0, interval["low"]), "high": min(1.0, interval["high"])}
        self.result = result
        return 0
