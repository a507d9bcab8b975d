"""How each task went over time, from the rewards in the store. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aglite import units

SPARK = 24
"""Groups that the line of a task shows, the newest."""


def task_history(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`{"task_id", "rollouts", "solved", "mean", "over_time"}` of each task, in the order in which they came up first.

    `rows` are rewards in order (`Store.task_rewards`). `solved` is the pass rate, the share of rollouts with a reward
    of 1 or more; `over_time` has `{"step", "n", "solved", "mean"}` of each group, `step` None while it is not trained.
    """
    tasks: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        tasks.setdefault(row["task_id"], {}).setdefault(row["group_id"], []).append(row)
    return [
        {
            "task_id": task_id,
            **_sums([row["reward"] for group in groups.values() for row in group], "rollouts"),
            "over_time": [
                {"step": group[0]["step"], **_sums([row["reward"] for row in group], "n")} for group in groups.values()
            ],
        }
        for task_id, groups in tasks.items()
    ]


def table(tasks: Sequence[Mapping[str, Any]], resting: Sequence[str]) -> Iterator[str]:
    """One line a task: its pass rate, at first and at last, and over time."""
    if not tasks:
        yield "no rewards yet"
        return
    width = max(len("task"), *(len(task["task_id"]) for task in tasks))
    yield f"{'task':<{width}}  groups  rollouts  solved  first   last  over time"
    for task in tasks:
        rates = [group["solved"] for group in task["over_time"]]
        line = "".join(units.BARS[round(rate * (len(units.BARS) - 1))] for rate in rates[-SPARK:])
        rests = "  rests" if task["task_id"] in resting else ""
        yield (
            f"{task['task_id']:<{width}}  {len(rates):>6}  {task['rollouts']:>8}  {task['solved']:>6.0%}  "
            f"{rates[0]:>5.0%}  {rates[-1]:>5.0%}  {line}{rests}"
        )


def _sums(rewards: Sequence[float], name: str) -> dict[str, float]:
    return {
        name: len(rewards),
        "solved": sum(reward >= 1 for reward in rewards) / len(rewards),
        "mean": statistics.fmean(rewards),
    }
