"""What evaluations say: pass@k with its interval, whether a model got better, which is best, when to stop. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aglite.training.metrics import Z95, mean_interval, pass_at_k

Row = Mapping[str, Any]
"""An evaluation as `Store.evaluations` gives it."""


def share_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean of numbers between 0 and 1, one a task, with its standard error and 95% interval, as `mean_interval`.

    The interval is Wilson's (1927, Probable inference, the law of succession, and statistical inference) with the tasks
    as draws: it stays within 0 and 1, and does not shrink to nothing where all tasks are solved, or none. It is exact
    in its kind for one rollout a task; with several it is on the safe side, since numbers between 0 and 1 with mean p
    vary at most as p (1 - p).
    """
    found = mean_interval(values)
    n, p = len(values), found["mean"]
    if not n:
        return found | {"low": 0.0, "high": 1.0}
    z2 = Z95 * Z95 / n
    centre = (p + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2)
    # at p = 0 and 1 one end is p itself, but for rounding
    return found | {"low": max(0.0, min(p, centre - half)), "high": min(1.0, max(p, centre + half))}


def ks_of(n: int) -> list[int]:
    """The k of pass@k that are told of n rollouts a task: 1, 2, 4, ... and n."""
    return sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})


def pass_at(rewards: Iterable[Sequence[float]], ks: Iterable[int], solved_at: float) -> dict[str, dict[str, float]]:
    """`{"pass@k": interval}` for each k; `rewards` holds those of each task, `solved_at` is the least of a solution.

    A task of which fewer than k rollouts could be graded says nothing about pass@k, and is not counted there.
    """
    counts = [(len(each), sum(reward >= solved_at for reward in each)) for each in rewards]
    return {f"pass@{k}": share_interval([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in ks}


def paired_difference(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How much better `after` is than `before` (rewards by task): `mean_interval` of the differences of each task's
    means, over the tasks that both have. Tasks differ more than models do, so this interval is much narrower than those
    of the two means suggest."""
    common = before.keys() & after.keys()
    return mean_interval([statistics.fmean(after[task]) - statistics.fmean(before[task]) for task in sorted(common)])


def comparable(rows: Iterable[Row]) -> list[Row]:
    """The finished evaluations of the validation tasks that were made as the newest was: as many tasks and rollouts.
    What an evaluation takes may change in a run; scores from before and after say nothing about each other."""
    done = [row for row in rows if row["state"] == "done" and row["split"] == "val"]
    return [row for row in done if _made(row) == _made(done[-1])]


def best(rows: Iterable[Row]) -> Row | None:
    """Of these evaluations the first with the highest mean reward. The untrained model counts too."""
    return max(rows, key=lambda row: row["result"]["mean"], default=None)


def without_progress(rows: Sequence[Row]) -> int:
    """How many steps were evaluated since the best of these evaluations."""
    top = best(rows)
    return 0 if top is None else len({row["step"] for row in rows if row["step"] > top["step"]})


def _made(row: Row) -> tuple[int, int]:
    result = row["result"]
    return result["n"] + result.get("lost", 0), result.get("rollouts_per_task", 1)


def enough(rows: Sequence[Row], patience: int | None) -> str:
    """Why no better evaluation is to be waited for, '' while one is; `rows` are the comparable evaluations."""
    since, top = without_progress(rows), best(rows)
    if patience is None or top is None or since < patience:
        return ""
    return f"{since} evaluations since step {top['step']} ({top['result']['mean']:.3f}) were not better"
