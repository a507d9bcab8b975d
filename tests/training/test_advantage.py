"""Advantages and weights against formulas written out plainly."""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.training.advantage import advantages, advantages_over_samples, token_weights, update_baseline

rewards = st.floats(-1e3, 1e3, allow_nan=False)
groups = st.lists(st.lists(rewards, min_size=1, max_size=8), max_size=4)
counts = st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=6)


def spread(group: list[float]) -> bool:
    return len(group) > 1 and min(group) != max(group)


def close(a: float, b: float, scale: float = 1.0) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 * max(1.0, scale))


@given(groups)
def test_grpo(given_groups: list[list[float]]) -> None:
    for group, found in zip(given_groups, advantages("grpo", given_groups), strict=True):
        if not spread(group):
            assert found == [0.0] * len(group)
            continue
        exact = [Fraction(reward) for reward in group]
        mean = sum(exact) / len(exact)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in exact) / (len(exact) - 1))
        for reward, advantage in zip(exact, found, strict=True):
            assert math.isclose(advantage, float(reward - mean) / (std + 1e-6), rel_tol=1e-6, abs_tol=1e-6)


@given(groups)
def test_dr_grpo(given_groups: list[list[float]]) -> None:
    for group, found in zip(given_groups, advantages("dr_grpo", given_groups), strict=True):
        for reward, advantage in zip(group, found, strict=True):
            expected = reward - statistics.fmean(group) if len(group) > 1 else 0.0
            assert close(advantage, expected, max(map(abs, group)))


@given(groups)
def test_rloo(given_groups: list[list[float]]) -> None:
    for group, found in zip(given_groups, advantages("rloo", given_groups), strict=True):
        for index, (reward, advantage) in enumerate(zip(group, found, strict=True)):
            others = group[:index] + group[index + 1 :]
            assert close(advantage, reward - statistics.fmean(others) if others else 0.0, max(map(abs, group)))


@given(groups, st.none() | rewards)
def test_reinforce(given_groups: list[list[float]], baseline: float | None) -> None:
    everything = [reward for group in given_groups for reward in group]
    expected = baseline if baseline is not None else statistics.fmean(everything or [0.0])
    found = advantages("reinforce", given_groups, baseline)
    assert [len(group) for group in found] == [len(group) for group in given_groups]
    for group, values in zip(given_groups, found, strict=True):
        for reward, advantage in zip(group, values, strict=True):
            assert close(advantage, reward - expected, 1e3)


def test_known_values() -> None:
    group = [[1.0, 0.0, 0.0, 1.0]]
    std = math.sqrt(4 * 0.25 / 3)
    assert advantages("grpo", group)[0] == pytest.approx([v / (std + 1e-6) for v in (0.5, -0.5, -0.5, 0.5)])
    assert advantages("dr_grpo", group)[0] == [0.5, -0.5, -0.5, 0.5]
    assert advantages("rloo", group)[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages("reinforce", [[1.0], [0.0, 0.5]], 0.25) == [[0.75], [-0.25, 0.25]]
    assert advantages("grpo", [[], [3.0]]) == [[], [0.0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-300, 1e300, -7.7, 0.0])
def test_equal_rewards_have_exactly_no_advantage(name: str, reward: float) -> None:
    for n in range(1, 12):
        assert advantages(name, [[reward] * n]) == [[0.0] * n]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_extremes_stay_finite(name: str) -> None:
    for group in ([1e300, -1e300], [1e-300, 2e-300], [0.1, 0.1 + 1e-16], [1e160, 0.0, 0.0]):
        assert all(math.isfinite(value) for value in advantages(name, [group])[0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce"])
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(name: str, reward: float) -> None:
    with pytest.raises(ValueError, match="no advantage"):
        advantages(name, [[1.0, reward]])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'gae'"):
        advantages("gae", [[1.0]])
    with pytest.raises(ValueError, match="'mean'"):
        token_weights("mean", [[1]])
    with pytest.raises(ValueError, match="constant"):
        token_weights("rollout_constant", [[1]])


def test_the_running_mean() -> None:
    baseline = update_baseline(None, [1.0, 0.0])
    assert baseline == 0.5
    baseline = update_baseline(baseline, [1.0])
    assert baseline == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)
    assert update_baseline(baseline, []) == baseline and update_baseline(None, []) is None


def loss(normalize: str, tokens: list[list[list[float]]], constant: int = 100) -> float:
    """sum over tokens of weight * made-up per-token loss, float64."""
    weights = token_weights(normalize, [[len(sample) for sample in rollout] for rollout in tokens], constant)
    return math.fsum(
        weight * value
        for rollout, per_sample in zip(tokens, weights, strict=True)
        for sample, weight in zip(rollout, per_sample, strict=True)
        for value in sample
    )


@given(counts)
def test_what_the_weights_sum_to(trained: list[list[int]]) -> None:
    def total(normalize: str, constant: int | None = None) -> list[float]:
        weights = token_weights(normalize, trained, constant)
        assert [len(row) for row in weights] == [len(row) for row in trained]
        return [sum(w * t for w, t in zip(row, ts, strict=True)) for row, ts in zip(weights, trained, strict=True)]

    alive = sum(sum(row) > 0 for row in trained)
    expected = 1.0 if alive else 0.0
    per_rollout = total("rollout")
    assert sum(per_rollout) == pytest.approx(expected)
    assert all(
        share == pytest.approx(1 / alive if sum(row) else 0) for share, row in zip(per_rollout, trained, strict=True)
    )
    for share, row in zip(total("rollout_constant", 64), trained, strict=True):
        assert share == pytest.approx(sum(row) / (alive * 64) if alive else 0)
    everything = sum(map(sum, trained))
    for share, row in zip(total("token"), trained, strict=True):
        assert share == pytest.approx(sum(row) / everything if everything else 0)
    samples = sum(count > 0 for row in trained for count in row)
    weights = token_weights("sample", trained)
    assert all(
        weight * count == pytest.approx(1 / samples if count else 0)
        for row, ts in zip(weights, trained, strict=True)
        for weight, count in zip(row, ts, strict=True)
    )


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=30), min_size=1, max_size=5), st.integers(0, 2**32))
def test_how_a_rollout_was_split_changes_nothing(tokens: list[list[float]], seed: int) -> None:
    noise = random.Random(seed)

    def fragment(rollout: list[float]) -> list[list[float]]:
        cuts = sorted(noise.sample(range(len(rollout) + 1), k=noise.randint(0, len(rollout))))
        parts = [rollout[a:b] for a, b in zip([0, *cuts], [*cuts, len(rollout)], strict=True)]
        noise.shuffle(parts)
        return parts

    whole = [[rollout] for rollout in tokens]
    split = [fragment(rollout) for rollout in tokens]
    for normalize in ("rollout", "rollout_constant", "token"):
        assert loss(normalize, split) == pytest.approx(loss(normalize, whole), rel=1e-12, abs=1e-12)


def test_but_it_does_with_sample_normalisation() -> None:
    whole: Any = [[[1.0, 1.0, 1.0, 5.0]], [[0.0]]]
    split: Any = [[[1.0, 1.0, 1.0], [5.0]], [[0.0]]]
    assert loss("sample", whole) != pytest.approx(loss("sample", split))


def test_over_samples_a_rollout_counts_as_often_as_it_fell_into_samples() -> None:
    # rewards 1, 0, 0 with 1, 3 and no samples: the samples' rewards are 1, 0, 0, 0
    (found,) = advantages_over_samples("dr_grpo", [[1.0, 0.0, 0.0]], [[1, 3, 0]])
    assert found == [0.75, -0.25, 0.0]
    (found,) = advantages_over_samples("grpo", [[1.0, 0.0]], [[1, 3]])
    assert found == pytest.approx([0.75 / 0.5, -0.25 / 0.5], abs=1e-5)
    assert advantages_over_samples("reinforce", [[1.0, 0.0], [0.5]], [[2, 0], [1]], 0.25) == [[0.75, 0.0], [0.25]]


@given(st.lists(st.lists(rewards, min_size=2, max_size=8), max_size=4), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_over_samples_is_over_rollouts_when_each_is_one_sample(given_groups: list[list[float]], name: str) -> None:
    ones = [[1] * len(group) for group in given_groups]
    assert advantages_over_samples(name, given_groups, ones) == advantages(name, given_groups)
