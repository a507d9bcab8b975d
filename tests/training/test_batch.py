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
    constrained: bool = False
    fork_cause: str = ""

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


def build(groups, calls, settings=None, version=3, set_aside=()):
    """Rewards by rollout in groups, e.g. [{"a": 1.0, "b": 0.0}]."""
    graded, aside = (
        [[GradedRollout(name, "task", reward) for name, reward in group.items()] for group in each]
        for each in (groups, set_aside)
    )
    return build_batch(
        graded, calls.__getitem__, settings or recipe(), version=version, baseline=None, lr=0.1, set_aside=aside
    )


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


def test_an_advantage_over_samples_depends_on_how_rollouts_fell_apart():
    calls = {"a": [FakeCall(1, [1], [3])], "b": [FakeCall(number, [number], [5]) for number in (2, 3, 4)]}
    over_samples = build([{"a": 1.0, "b": 0.0}], calls, recipe(name="rloo", advantage_over="samples"))
    assert [row["advantage"] for row in over_samples.message["rows"]] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    over_rollouts = build([{"a": 1.0, "b": 0.0}], calls, recipe(name="rloo"))
    assert [row["advantage"] for row in over_rollouts.message["rows"]] == pytest.approx([1.0, -1.0, -1.0, -1.0])


def test_zero_advantage_counts_in_the_denominator_but_is_not_computed():
    calls = {name: [FakeCall(i, [1], [2])] for i, name in enumerate("abcd")}
    batch = build([{"a": 1.0, "b": 0.0}, {"c": 0.5, "d": 0.5}], calls)
    assert len(batch.message["rows"]) == 2
    assert [row["weight"] for row in batch.message["rows"]] == pytest.approx([1 / 4, 1 / 4])
    assert batch.metrics["zero_advantage_groups"] == 1
    assert batch.metrics["samples_zero_advantage"] == 2
    assert batch.metrics["samples"] == 4


@pytest.mark.parametrize("term", [{"kl": 0.1}, {"entropy": 0.1}, {"skip_zero_advantage": False}])
def test_a_term_of_its_own_makes_every_row_count(term):
    calls = {name: [FakeCall(i, [1], [2])] for i, name in enumerate("ab")}
    skipped = build([{"a": 0.5, "b": 0.5}], calls)
    assert skipped.message is None and skipped.metrics["ledger"]["zero_advantage"] == 2
    batch = build([{"a": 0.5, "b": 0.5}], calls, recipe(**term))
    assert len(batch.message["rows"]) == 2 and batch.metrics["samples_zero_advantage"] == 0
    assert (batch.metrics["ledger"]["computed"], batch.metrics["ledger"]["zero_advantage"]) == (2, 0)


def test_groups_set_aside_are_reported_and_nothing_else():
    calls = {name: [FakeCall(i, [1], [2] * (i + 1))] for i, name in enumerate("abcd")}
    alone = build([{"a": 1.0, "b": 0.0}], calls)
    batch = build([{"a": 1.0, "b": 0.0}], calls, set_aside=[{"c": 1.0, "d": 1.0}])
    assert batch.message == alone.message
    assert batch.fates == {"a": "trained", "b": "trained", "c": "set_aside", "d": "set_aside"}
    assert batch.metrics["reward_mean"] == 0.75 and batch.metrics["zero_advantage_groups"] == 1
    assert (batch.metrics["groups_set_aside"], batch.metrics["rollouts"]) == (1, 4)
    assert batch.metrics["ledger"] == {
        "sampled": 10,
        "no_loss": 0,
        "set_aside": 7,
        "stale": 0,
        "zero_advantage": 0,
        "computed": 3,
    }


def test_every_sampled_token_is_in_one_column_of_the_ledger():
    calls = {
        "a": [FakeCall(1, [1], [2, 3]), FakeCall(2, [7], [8], delivered=False)],
        "b": [FakeCall(3, [1], [2, 3, 4], versions=[[0, 3]])],
        "c": [FakeCall(4, [1], [5] * 5)],
        "d": [FakeCall(5, [1], [6] * 6), FakeCall(6, [1], [6] * 6, retry_of=5)],
    }
    batch = build([{"a": 1.0, "b": 0.0}, {"c": 0.5, "d": 0.5, "lost": None}], calls, recipe(max_staleness=1))
    assert batch.metrics["ledger"] == {
        "sampled": 23,
        "no_loss": 7,
        "set_aside": 0,
        "stale": 3,
        "zero_advantage": 11,
        "computed": 2,
    }
    assert batch.metrics["tokens_per_rollout"] == 23 / 4 and batch.metrics["groups_short"] == 0
    assert build([{"a": 1.0, "lost": None}], calls).metrics["groups_short"] == 1


def test_rows_are_counted_by_what_made_them():
    calls = {
        "a": [
            FakeCall(1, [1], [2], fork_cause="first"),
            FakeCall(2, [1, 2, 3], [4]),
            FakeCall(3, [9, 9], [8], fork_cause="new_thread"),
            FakeCall(4, [1, 2, 3], [5]),
        ],
        "b": [FakeCall(5, [1], [2], fork_cause="first"), FakeCall(6, [1, 7], [6], fork_cause="retokenised")],
    }
    metrics = build([{"a": 1.0, "b": 0.0}], calls).metrics
    assert {name: number for name, number in metrics["rows_by_cause"].items() if number} == {
        "first": 2,
        "new_thread": 1,
        "branch": 1,
        "retokenised": 1,
    }
    assert metrics["encoded_by_cause"] == {
        "first": 4 + 2,
        "new_thread": 3,
        "edited": 0,
        "template": 0,
        "retokenised": 3,
        "branch": 4,
    }
    assert sum(metrics["rows_by_cause"].values()) == metrics["samples"]
    assert sum(metrics["encoded_by_cause"].values()) == metrics["encoded_tokens"]


@pytest.mark.parametrize(
    "settings, bounds", [({}, [0.5, 2.0]), ({"rollout_rs_threshold": 4.0}, [0.25, 4.0]), ({"lower": 0.0}, [0.0, 2.0])]
)
def test_the_lower_bound_of_rejection_is_by_default_the_reciprocal(settings, bounds):
    settings = {key if key.startswith("r") else f"rollout_rs_threshold_{key}": value for key, value in settings.items()}
    calls = {name: [FakeCall(i, [1], [2])] for i, name in enumerate("ab")}
    assert build([{"a": 1.0, "b": 0.0}], calls, recipe(**settings)).message["rollout_rs_bounds"] == bounds


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


def test_forks_are_counted_over_all_calls_of_graded_rollouts():
    calls = {
        "a": [FakeCall(1, [1], [2], fork_cause="first"), FakeCall(2, [1, 2, 3], [4])],
        "b": [FakeCall(3, [1], [2], fork_cause="first"), FakeCall(4, [1, 5], [6], fork_cause="retokenised")],
        "lost": [FakeCall(5, [1], [2], fork_cause="edited")],
    }
    batch = build([{"a": 1.0, "b": 0.0, "lost": None}], calls)
    counted = {"continued": 1, "first": 2, "new_thread": 0, "edited": 0, "template": 0, "retokenised": 1}
    assert batch.metrics["forks"] == counted


def test_constrained_calls_are_marked_and_never_fresh():
    calls = {
        "a": [FakeCall(1, [1], [2, 3]), FakeCall(2, [1, 2, 3, 4], [5, 6], constrained=True)],
        "b": [FakeCall(3, [1], [2])],
    }
    batch = build([{"a": 1.0, "b": 0.0}], calls, recipe(groups_per_step=1))
    row = batch.message["rows"][0]
    assert list(row["mask"]) == [0, 1, 1, 0, 1, 1]
    assert list(row["constrained"]) == [0, 0, 0, 0, 1, 1] and list(row["fresh"]) == [0, 1, 1, 0, 0, 0]
    assert not any(batch.message["rows"][1]["constrained"])
    assert batch.metrics["calls_constrained"] == 1
