"""Statistics of steps and evaluations."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.training.metrics import forest_stats, mean_interval, pass_at_k, reward_stats, staleness_stats
from aglite.training.samples import Sample


def sample(versions: list[int], calls: list[tuple[int, bool]] | None = None) -> Sample:
    """-1 marks a token without loss."""
    mask = array("b", [int(version >= 0) for version in versions])
    n = len(versions)
    logprobs, free = array("f", [0.0] * n), array("b", [0] * n)
    return Sample(array("i", range(n)), mask, logprobs, array("i", versions), free, calls or [(1, True)])


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(numbers: tuple[int, int, int]) -> None:
    n, c, k = numbers
    solved = [index < c for index in range(n)]
    subsets = [any(chosen) for chosen in itertools.combinations(solved, k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    """Its expectation over binomial draws is 1 - (1 - p)^k, which 1 - (1 - c/n)^k would miss."""
    n, k, p = 6, 3, 0.3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize("numbers", [(0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_what_it_cannot_know(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(*numbers)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    noise = random.Random(4)
    hits = 0
    for _ in range(1000):
        found = mean_interval([noise.gauss(0.4, 0.2) for _ in range(64)])
        hits += found["low"] <= 0.4 <= found["high"]
    assert 920 <= hits <= 975


def test_the_interval_of_few_values() -> None:
    found = mean_interval([0.0, 1.0])
    assert (found["mean"], found["stderr"], found["n"]) == (0.5, pytest.approx(0.5), 2)
    assert found["high"] == pytest.approx(0.5 + 1.95996 * 0.5, abs=1e-4)
    assert mean_interval([0.7]) == {"mean": 0.7, "stderr": 0.0, "low": 0.7, "high": 0.7, "n": 1}
    assert mean_interval([])["mean"] == 0.0


def test_rewards() -> None:
    assert reward_stats([[1.0, 0.0], [0.5, 0.5], [0.25]]) == {
        "reward_mean": 0.45,
        "reward_std": statistics.stdev([1.0, 0.0, 0.5, 0.5, 0.25]),
        "groups": 3,
        "zero_advantage_groups": 2,
    }
    assert reward_stats([])["reward_std"] == 0.0


def test_a_merged_conversation_and_a_split_one() -> None:
    merged = [sample([-1, 0, -1, 0, -1, 0], [(1, True), (2, True), (3, True)])]
    split = [
        sample([-1, 0], [(4, True)]),
        sample([-1, -1, 0], [(5, True)]),
        sample([-1, -1, 0], [(4, False), (6, True)]),
    ]
    stats = forest_stats([merged, split])
    assert stats == {
        "samples": 4,
        "samples_per_rollout": 2.0,
        "samples_per_rollout_max": 3,
        "merge_rate": pytest.approx(1 - 4 / 6),
        "encoded_tokens": 14,
        "trained_tokens": 6,
        "encoded_per_trained": pytest.approx(14 / 6),
    }
    assert forest_stats([merged])["merge_rate"] == pytest.approx(2 / 3)
    assert forest_stats([])["merge_rate"] == 0.0


@given(st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=40), max_size=5))
def test_staleness(versions: list[list[int]]) -> None:
    found = staleness_stats([sample(each) for each in versions], version=9)
    ages = sorted(9 - version for each in versions for version in each if version >= 0)
    if not ages:
        assert found == {"staleness_mean": 0.0, "staleness_p95": 0, "staleness_max": 0}
        return
    assert found["staleness_mean"] == pytest.approx(statistics.fmean(ages))
    assert found["staleness_max"] == ages[-1]
    assert found["staleness_p95"] == ages[math.ceil(0.95 * len(ages)) - 1]
