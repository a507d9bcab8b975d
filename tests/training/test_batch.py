"""A step's batch: who trains, with which advantage and weight, and what is only counted."""

import statistics
from array import array
from dataclasses import dataclass, field

import pytest

from aglite.config import Recipe
from aglite.training.batch import GradedRollout, build_batch


@dataclass
class FakeCall:
    """What a recorded call looks like to the trainer."""

    id: int
    prompt_ids: list[int]
    response_ids: list[int]
    versions: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: str = "ok"
    delivered: bool = True
    retry_of: int | None = None

    def __post_init__(self):
        self.logprobs = self.logprobs or [-0.5] * len(self.response_ids)
        self.versions = self.versions or [[3, len(self.response_ids)]]


def recipe(**algorithm) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": "m",
            "tasks": {"train": "t.jsonl", "val": "t.jsonl"},
            "agent": {"command": ["true"], "limits": {"sampled_tokens": 100}},
            "reward": {"grade": "g.py:g"},
            "algorithm": {"group_size": 2, "groups_per_step": 2, **algorithm},
            "trainer": {"tokens_per_micro_batch": 8},
        }
    )


def build(groups, calls, settings=None, version=3):
    """Rewards by rollout in groups, e.g. [{"a": 1.0, "b": 0.0}]."""
    graded = [[GradedRollout(name, "task", reward) for name, reward in group.items()] for group in groups]
    return build_batch(graded, calls.__getitem__, settings or recipe(), version=version, baseline=None, lr=0.1)


def test_rows_carry_the_sampled_tokens_with_rollout_weights():
    calls = {
        # two separate contexts: two samples of 2 and 3 trained tokens
        "a": [FakeCall(1, [1, 2], [3, 4]), FakeCall(2, [9], [8, 7, 6], logprobs=[-0.25, -0.5, -1.0])],
        # a conversation that was continued: one sample with both turns
        "b": [FakeCall(3, [1, 2], [5]), FakeCall(4, [1, 2, 5, 0], [6, 6])],
    }
    batch = build([{"a": 1.0, "b": 0.0}], calls)
    rows = [(array("i", row["ids"]).tolist(), list(row["mask"])) for row in batch.message["rows"]]
    assert rows == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([9, 8, 7, 6], [0, 1, 1, 1]),
        ([1, 2, 5, 0, 6, 6], [0, 0, 1, 0, 1, 1]),
    ]
    assert array("f", batch.message["rows"][1]["logprobs"]).tolist() == [0.0, -0.25, -0.5, -1.0]
    assert [row["weight"] for row in batch.message["rows"]] == pytest.approx([1 / 10, 1 / 10, 1 / 6])
    unit = 0.5 / (statistics.stdev([1.0, 0.0]) + 1e-6)
    assert [row["advantage"] for row in batch.message["rows"]] == pytest.approx([unit, unit, -unit])
    assert sorted(index for micro in batch.message["plan"][0] for index in micro) == [0, 1, 2]
    assert batch.fates == {"a": "trained", "b": "trained"}
    records = batch.sample_records()
    assert [(record.tokens, record.trained_tokens) for record in records] == [(4, 2), (4, 3), (6, 3)]
    assert batch.metrics["samples_per_rollout"] == 1.5


def test_zero_advantage_counts_in_the_denominator_but_is_not_computed():
    calls = {name: [FakeCall(i, [1], [2])] for i, name in enumerate("abcd")}
    batch = build([{"a": 1.0, "b": 0.0}, {"c": 0.5, "d": 0.5}], calls)
    assert len(batch.message["rows"]) == 2
    assert [row["weight"] for row in batch.message["rows"]] == pytest.approx([1 / 4, 1 / 4])
    assert batch.metrics["zero_advantage_groups"] == 1
    assert batch.metrics["samples_zero_advantage"] == 2
    assert batch.metrics["samples"] == 4


def test_a_kl_term_makes_every_row_count():
    calls = {name: [FakeCall(i, [1], [2])] for i, name in enumerate("ab")}
    assert build([{"a": 0.5, "b": 0.5}], calls).message is None
    assert len(build([{"a": 0.5, "b": 0.5}], calls, recipe(kl=0.1)).message["rows"]) == 2


def test_stale_rollouts_stay_in_the_baseline_only():
    calls = {
        "a": [FakeCall(1, [1], [2, 3], versions=[[1, 1], [3, 1]])],
        "b": [FakeCall(2, [1], [2, 3])],
    }
    settings = recipe(max_staleness=1)
    batch = build([{"a": 1.0, "b": 0.0}], calls, settings)
    assert batch.fates == {"a": "stale", "b": "trained"}
    assert list(batch.message["rows"][0]["fresh"]) == [0, 1, 1]
    assert [row["advantage"] for row in batch.message["rows"]] == pytest.approx(
        [-0.5 / (statistics.stdev([1, 0]) + 1e-6)]
    )
    assert batch.message["rows"][0]["weight"] == pytest.approx(1 / 2)
    assert batch.metrics["rollouts_stale"] == 1
    assert build([{"a": 1.0, "b": 0.0}], calls, recipe(max_staleness=2)).fates["a"] == "trained"


def test_lost_silent_and_undelivered_rollouts():
    calls = {
        "a": [FakeCall(1, [1], [2])],
        "b": [],
        "c": [FakeCall(2, [1], [2], delivered=False)],
    }
    batch = build([{"a": 1.0, "b": 0.0, "c": 0.0, "lost": None}], calls)
    assert batch.fates == {"a": "trained", "b": "baseline_only", "c": "baseline_only"}
    assert batch.metrics["rollouts_lost"] == 1
    expected = (1 - 1 / 3) / (statistics.stdev([1, 0, 0]) + 1e-6)
    assert batch.message["rows"][0]["advantage"] == pytest.approx(expected)


def test_two_updates_split_whole_rollouts_and_weigh_each_by_itself():
    calls = {name: [FakeCall(i, [1], [2] * (i + 1))] for i, name in enumerate("abcd")}
    batch = build([{"a": 1.0, "b": 0.0}, {"c": 1.0, "d": 0.0}], calls, recipe(updates_per_step=2))
    assert [sorted(i for micro in mini for i in micro) for mini in batch.message["plan"]] == [[0, 1], [2, 3]]
    assert [row["weight"] for row in batch.message["rows"]] == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8])


def test_a_sample_longer_than_the_budget_is_trained_alone():
    calls = {"a": [FakeCall(1, list(range(20)), [2])], "b": [FakeCall(2, [1], [2])]}
    batch = build([{"a": 1.0, "b": 0.0}], calls)
    assert sorted(batch.message["plan"][0]) == [[0], [1]]
