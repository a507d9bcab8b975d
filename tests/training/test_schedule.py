"""Plans of micro-batches and mini-batches."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.errors import AgliteError
from aglite.training.schedule import learning_rate, plan_micro_batches, split_mini_batches

lengths_and_budget = st.integers(1, 300).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=40), st.just(budget))
)


@given(lengths_and_budget)
def test_every_sample_once_under_the_budget_and_balanced(given_plan: tuple[list[int], int]) -> None:
    lengths, budget = given_plan
    plan = plan_micro_batches(lengths, budget)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in batch) for batch in plan]
    assert all(0 < total <= budget for total in sums)
    if plan:
        assert max(sums) - min(sums) <= max(lengths)
        # Never more than twice what any plan needs (plus one).
        assert len(plan) <= 2 * -(-sum(lengths) // budget) + 1


@given(lengths_and_budget, st.integers(0, 2**32))
def test_the_loss_does_not_depend_on_the_split(given_plan: tuple[list[int], int], seed: int) -> None:
    lengths, budget = given_plan
    noise = random.Random(seed)
    tokens = [[noise.uniform(-1, 1) for _ in range(length)] for length in lengths]
    whole = math.fsum(value for sample in tokens for value in sample)
    for limit in (budget, budget * 3):
        plan = plan_micro_batches(lengths, limit)
        summed = sum(sum(sum(tokens[index]) for index in batch) for batch in plan)
        # 12,000 numbers below 1 at most: rounding of their sums comes to less than 12,000 * 12,000 * 2**-53
        assert summed == pytest.approx(whole, rel=0, abs=1e-7)


def test_known_plans() -> None:
    assert plan_micro_batches([], 10) == []
    assert plan_micro_batches([10], 10) == [[0]]
    assert plan_micro_batches([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]
    assert plan_micro_batches([1, 1, 1], 100) == [[0, 1, 2]]
    # Two would hold 18 tokens, but not these pieces.
    assert len(plan_micro_batches([6, 6, 6], 9)) == 3


def test_a_sample_that_does_not_fit_is_named_with_the_setting() -> None:
    with pytest.raises(AgliteError) as refusal:
        plan_micro_batches([5, 70, 90], 64, names=["a", "b", "sample 1 of rollout r-7"])
    assert "sample 1 of rollout r-7 has 90 tokens" in refusal.value.message
    assert "trainer.tokens_per_micro_batch: 64" in refusal.value.message
    assert "at least 90" in refusal.value.mend
    with pytest.raises(AgliteError, match="sample 1 has 70 tokens"):
        plan_micro_batches([5, 70], 64)


def test_a_longer_sample_goes_alone_where_that_is_allowed() -> None:
    plan = plan_micro_batches([5, 70, 6, 90], 64, allow_longer=True)
    assert sorted(plan) == [[0, 2], [1], [3]]


def test_a_large_step_is_planned_quickly() -> None:
    noise = random.Random(1)
    lengths = [min(8192, int(noise.lognormvariate(7, 1))) + 1 for _ in range(5000)]
    started = time.process_time()
    plan = plan_micro_batches(lengths, 16384)
    assert time.process_time() - started < 2
    assert len(plan) <= 1.05 * sum(lengths) / 16384 + 1


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 8))
def test_mini_batches_are_whole_rollouts_of_equal_number(rollouts: list[int], n: int) -> None:
    batches = split_mini_batches(rollouts, n)
    assert [rollout for batch in batches for rollout in batch] == rollouts
    assert len(batches) == min(n, len(rollouts))
    sizes = [len(batch) for batch in batches]
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)


def rates(schedule: str, steps: int = 6, warmup_steps: int = 2) -> list[float]:
    return [
        learning_rate(3.0, step, steps=steps, warmup_steps=warmup_steps, schedule=schedule) for step in range(steps)
    ]


def test_known_learning_rates() -> None:
    assert rates("constant") == pytest.approx([1, 2, 3, 3, 3, 3])
    assert rates("linear") == pytest.approx([1, 2, 3, 2.25, 1.5, 0.75])
    half = 0.5**0.5
    assert rates("cosine") == pytest.approx([1, 2, 3, 1.5 * (1 + half), 1.5, 1.5 * (1 - half)])
    assert rates("linear", steps=3, warmup_steps=0) == pytest.approx([3, 2, 1])
    with pytest.raises(ValueError, match="'cosin'"):
        rates("cosin")


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 60), st.integers(0, 59))
def test_the_learning_rate_rises_then_never_rises_again_and_is_never_0(schedule: str, steps: int, warmup: int) -> None:
    found = rates(schedule, steps, warmup)
    top = min(warmup, steps - 1)
    assert all(0 < rate <= 3 for rate in found)
    assert found[: top + 1] == sorted(found[: top + 1]) and found[top:] == sorted(found[top:], reverse=True)
    assert warmup >= steps or found[top] == 3
