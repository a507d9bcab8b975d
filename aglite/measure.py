"""`aglite measure`: how hard a recipe's tasks are for a model, before any of it is trained."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

from aglite.config import Recipe
from aglite.evaluate import evaluate
from aglite.paths import RunDir
from aglite.tasks import MAX_ROWS
from aglite.training.metrics import mean_interval
from aglite.training.scores import ks_of, pass_at

BINS = ("never solved", "up to 1/4", "up to 1/2", "up to 3/4", "below all", "always solved")
"""Tasks by the share of their rollouts that solved them; the upper bound belongs to the bin."""
BAR = 40
"""Characters of the longest bar."""


def measure(
    recipe: Recipe,
    *,
    n: int | None = None,
    split: str = "train",
    tasks: int | None = None,
    checkpoint: Path | None = None,
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Sample every task of a split `n` times (default: the recipe's group size), as training would with `split` train,
    and sum up how hard they are (`difficulty`). `tasks`: only the first so many. Raises AgliteError."""
    recipe.evaluation.tasks = tasks or MAX_ROWS
    result = evaluate(
        recipe,
        checkpoint=checkpoint,
        split=split,
        n=n or recipe.algorithm.group_size,
        run_dir=run_dir or RunDir(Path("runs") / f"{recipe.name}.measure"),
        on_line=on_line,
    )
    found = difficulty(result["rewards"], recipe.algorithm.group_size, recipe.evaluation.solved_at)
    return {"split": split, **found, "lost": result["lost"]}


def difficulty(rewards: Mapping[str, Sequence[float]], group_size: int, solved_at: float = 1.0) -> dict[str, Any]:
    """What the rewards of each task's rollouts say; solved means a reward of `solved_at` or more.

    - `tasks`, `rollouts`, `mean` (mean reward over tasks, with its 95% interval);
    - `histogram`: how many tasks are in each of `BINS`;
    - `pass@k` for k = 1, 2, 4, ... up to the rollouts of a task, and for that number: the unbiased estimate of Chen et
      al. 2021 with a 95% interval over tasks;
    - `teaching`: the share of groups of `group_size` whose rewards would not all be equal, and so teach something;
      None where no task has that many rollouts. Estimated without bias from all subsets of a task's rollouts:
      1 - sum over its different rewards of C(c, g) / C(n, g);
    - `by_task`: `{"n", "solved", "mean"}` of each.
    """
    solved = {task: sum(reward >= solved_at for reward in each) for task, each in rewards.items()}
    counts = Counter(_bin(solved[task], len(each)) for task, each in rewards.items())
    most = max((len(each) for each in rewards.values()), default=0)
    teaching = [_teaching(each, group_size) for each in rewards.values() if len(each) >= group_size]
    return {
        "tasks": len(rewards),
        "rollouts": sum(len(each) for each in rewards.values()),
        "mean": mean_interval([statistics.fmean(each) for each in rewards.values()]),
        "histogram": {name: counts[place] for place, name in enumerate(BINS)},
        **pass_at(rewards.values(), ks_of(most) if most else [], solved_at),
        "group_size": group_size,
        "teaching": statistics.fmean(teaching) if teaching else None,
        "by_task": {
            task: {"n": len(each), "solved": solved[task], "mean": statistics.fmean(each)}
            for task, each in rewards.items()
        },
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """A measurement as lines: the histogram as bars, pass@k, what it means for training."""
    histogram = result["histogram"]
    largest = max([*histogram.values(), 1])
    yield f"{result['tasks']} tasks of {result['split']}, {result['rollouts']} rollouts; solved in"
    for name, number in histogram.items():
        bar = "█" * -(-number * BAR // largest)
        yield f"  {name:<13}  {bar:<{BAR}}  {number}"
    mean = result["mean"]
    yield f"mean reward  {mean['mean']:.3f}  95%: {mean['low']:.3f} to {mean['high']:.3f}"
    for name in (key for key in result if key.startswith("pass@")):
        value = result[name]
        yield f"{name:<11}  {value['mean']:.3f}  95%: {value['low']:.3f} to {value['high']:.3f}, {value['n']} tasks"
    if result["lost"]:
        yield f"not graded   {result['lost']} of the tasks"
    if result["teaching"] is None:
        yield f"what share of groups of {result['group_size']} would teach something needs --n of at least that"
    else:
        yield f"{result['teaching']:.0%} of groups of {result['group_size']} have rewards that differ: these teach"


def _bin(solved: int, n: int) -> int:
    if solved in (0, n):
        return 0 if solved == 0 else len(BINS) - 1
    return -(-4 * solved // n)  # the quarter, from 1


def _teaching(rewards: Sequence[float], group_size: int) -> float:
    if group_size < 2:
        return 0.0
    equal = sum(comb(count, group_size) for count in Counter(rewards).values())
    return 1 - equal / comb(len(rewards), group_size)
