"""What trips the guard, and what must not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from aglite.config import Guard
from aglite.training.guard import GuardState, watch, watch_evaluation


def run(values: list[dict[str, Any]], **settings: Any) -> list[tuple[int, str]]:
    """(step, what was said) over a run; a step is metrics, with `finite` and `rewards` besides."""
    state, guard, said = GuardState(), Guard(**settings), []
    for step, metrics in enumerate(values, 1):
        finite, rewards = metrics.pop("finite", True), metrics.pop("rewards", {})
        said += [(step, text) for text in watch(state, guard, metrics, rewards, finite=finite)]
    return said


def test_updates_that_are_not_finite_in_a_row() -> None:
    spoiled = [True, False, True, False, None, False, True]
    assert [step for step, _ in run([{"finite": finite} for finite in spoiled])] == [6]
    ((_, text),) = run([{"finite": False}, {"finite": False}])
    assert "2 updates in a row" in text and "trainer.lr" in text
    assert run([{"finite": False}] * 5, not_finite=0) == []


@pytest.mark.parametrize(
    "key, values, said",
    [
        ("entropy", [0.8] * 4 + [0.01] * 4, "entropy went from 0.8 to 0.01, 0.012 times what it was: the policy says"),
        ("entropy", [0.8] * 4 + [4.0] * 4, "entropy went from 0.8 to 4, 5 times what it was: the policy has lost its"),
        ("tokens_per_rollout", [40] * 4 + [9] * 4, "tokens sampled per rollout went from 40 to 9"),
        ("tokens_per_rollout", [40] * 4 + [200] * 4, "replies do not end"),
        ("kl_ref", [0.0] * 4 + [1.2] * 4, "the KL to the starting model is 1.2 nats a token"),
    ],
)
def test_what_runs_away_is_named_with_its_mend(key: str, values: list[float], said: str) -> None:
    told = run([{key: value} for value in values])
    assert [step for step, _ in told] == [8] and said in told[0][1]
    off = {"entropy_low": 0, "entropy_high": 0, "length_low": 0, "length_high": 0, "kl_high": 0}
    assert run([{key: value} for value in values], **off) == []


def test_one_odd_step_trips_nothing() -> None:
    quiet = [{"entropy": 0.8, "tokens_per_rollout": 40.0} for _ in range(12)]
    quiet[7] = {"entropy": 0.02, "tokens_per_rollout": 90.0}
    quiet[9] = {"entropy": math.nan}
    assert run(quiet) == []


def test_learning_is_no_collapse() -> None:
    noise = random.Random(1)
    steps = [
        {
            "entropy": 0.8 * 0.97**step * noise.uniform(0.7, 1.4),
            "tokens_per_rollout": 40 * noise.uniform(0.7, 1.4),
            "rewards": {"": [min(1.0, 0.2 + step / 60 + noise.uniform(-0.3, 0.3)) for _ in range(4)]},
        }
        for step in range(60)
    ]
    assert run(steps) == []


def test_a_kind_of_task_that_is_lost_while_the_others_hold() -> None:
    """As when a model learns to end its replies one token early: only what must be closed suffers."""
    noise = random.Random(2)
    steps = []
    for step in range(24):
        json = 0.85 if step < 15 else 0.0
        each = {"json": [max(0.0, json + noise.uniform(-0.1, 0.1))], "word": [0.7 + noise.uniform(-0.2, 0.2)]}
        steps.append({"rewards": {**each, "": [*each["json"], *each["word"]]}})
    told = run(steps)
    assert "tasks of kind 'json' fell from 0.8" in told[0][1] and "--set" not in told[0][1]
    assert 16 <= told[0][0] <= 19


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_0_and_1_is_no_fall(seed: int) -> None:
    noise = random.Random(seed)
    steps = [{"rewards": {"": [float(noise.random() < 0.5) for _ in range(4)]}} for _ in range(200)]
    assert run(steps) == []


def test_forgiven_it_compares_with_what_comes_next() -> None:
    state, guard = GuardState(), Guard(window=2)
    for value in (1.0, 1.0, 0.01):
        assert watch(state, guard, {"entropy": value}, {}, finite=True) == []
    assert watch(state, guard, {"entropy": 0.01}, {}, finite=True)
    state.forgive()
    for value in (0.01, 0.01, 0.01, 0.01, 0.009):
        assert watch(state, guard, {"entropy": value}, {}, finite=True) == []


def test_a_kind_that_an_evaluation_finds_lost() -> None:
    """What training may not have met yet: few of its last groups were of that kind."""
    state, guard = GuardState(), Guard()
    first = {"json": (0.51, 25), "list": (0.05, 20), "": (0.24, 64)}
    assert watch_evaluation(state, guard, first) == []
    (said,) = watch_evaluation(state, guard, {"json": (0.04, 25), "list": (0.63, 20), "": (0.33, 64)})
    assert "validation reward of tasks of kind 'json' fell from 0.51 to 0.04" in said
    assert watch_evaluation(GuardState(best={"json": 0.51}), Guard(validation_drop=0), {"json": (0.04, 25)}) == []


@pytest.mark.parametrize("now, tasks", [(0.2, 5), (0.45, 1000)])
def test_chance_and_small_falls_are_none(now: float, tasks: int) -> None:
    state = GuardState()
    assert watch_evaluation(state, Guard(), {"": (0.6, tasks)}) == []
    assert watch_evaluation(state, Guard(), {"": (now, tasks)}) == []
    assert watch_evaluation(state, Guard(), {"": (0.1, tasks)}) == [] or tasks == 1000
