"""What evaluations say of a model, and of one another."""

from __future__ import annotations

import random

import pytest

from aglite.training.scores import (
    best,
    comparable,
    enough,
    ks_of,
    paired_difference,
    pass_at,
    share_interval,
    without_progress,
)


@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    # from statsmodels' proportion_confint(method="wilson")
    [(0, 10, 0.0, 0.277533), (5, 10, 0.236593, 0.763407), (10, 10, 0.722467, 1.0), (1, 4, 0.045587, 0.699358)],
)
def test_the_interval_of_a_share(solved: int, n: int, low: float, high: float) -> None:
    found = share_interval([1.0] * solved + [0.0] * (n - solved))
    assert found["mean"] == solved / n and found["n"] == n
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))


def test_of_nothing_nothing_is_known() -> None:
    assert share_interval([]) == {"mean": 0.0, "stderr": 0.0, "low": 0.0, "high": 1.0, "n": 0}


def test_the_interval_of_a_share_covers_the_truth_where_few_tasks_are_solved() -> None:
    """Where mean +- 1.96 standard errors does not: with 5% of 16 tasks solved it misses in nearly half of all cases."""
    noise = random.Random(2)
    hits = 0
    for _ in range(2000):
        found = share_interval([float(noise.random() < 0.05) for _ in range(16)])
        hits += found["low"] <= 0.05 <= found["high"]
    assert hits >= 1900


def test_which_k_are_told() -> None:
    assert [ks_of(n) for n in (1, 2, 3, 4, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_pass_at_k_over_tasks() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.6, 1.2]]
    found = pass_at(rewards, [1, 2, 4], solved_at=1.0)
    assert found["pass@1"]["mean"] == pytest.approx((0.25 + 0 + 0.5) / 3)
    assert found["pass@2"]["mean"] == pytest.approx((0.5 + 0 + 1) / 3)
    # of a task with two rollouts nothing is known about four
    assert found["pass@4"]["mean"] == pytest.approx(0.5) and found["pass@4"]["n"] == 2
    assert pass_at(rewards, [1], solved_at=0.6)["pass@1"]["mean"] == pytest.approx((0.25 + 0 + 1) / 3)


def test_a_difference_is_taken_task_by_task() -> None:
    before = {f"t{n}": [n / 10, n / 10] for n in range(10)}
    after = {task: [rewards[0] + 0.1] for task, rewards in before.items()} | {"new": [0.0]}
    found = paired_difference(before, after)
    # each task got better by the same, however much the tasks differ
    assert (found["mean"], found["n"]) == (pytest.approx(0.1), 10)
    assert found["stderr"] == pytest.approx(0.0, abs=1e-12)


def evaluation(step: int, mean: float, n: int = 8, state: str = "done", split: str = "val", **more: int) -> dict:
    return {"step": step, "state": state, "split": split, "result": {"mean": mean, "n": n, **more}}


def test_only_like_is_compared_with_like() -> None:
    first, second = evaluation(0, 0.9), evaluation(5, 0.2, n=7, lost=1, rollouts_per_task=1)
    assert comparable([first, second]) == [first, second]
    fewer, more = evaluation(5, 0.2, n=4), evaluation(5, 0.2, rollouts_per_task=4)
    assert comparable([first, fewer]) == [fewer] and comparable([first, more]) == [more]
    others = [evaluation(6, 1.0, state="rolled_back"), evaluation(7, 1.0, split="train")]
    assert comparable([first, second, *others]) == [first, second]
    assert comparable([]) == [] and best([]) is None


def test_when_it_is_enough() -> None:
    rows = [evaluation(step, mean) for step, mean in ((0, 0.1), (2, 0.5), (4, 0.5), (6, 0.4), (6, 0.45))]
    assert best(rows)["step"] == 2  # the first, when others do as well
    assert without_progress(rows) == 2  # steps, however often they were looked at
    assert enough(rows, 3) == "" and enough(rows, None) == ""
    assert enough(rows, 2) == "2 evaluations since step 2 (0.500) were not better"
    assert enough([*rows, evaluation(8, 0.6)], 1) == "" and enough([], 1) == ""
