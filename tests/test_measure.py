"""How hard tasks are: the histogram, pass@k, the share of groups that teach."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.measure import difficulty, page


def test_every_task_is_in_its_bin() -> None:
    def task(solved: int) -> list[float]:
        return [1.0] * solved + [0.3] * (8 - solved)

    result = difficulty({f"t{solved}": task(solved) for solved in range(9)}, 8)
    assert result["histogram"] == {
        "never solved": 1,
        "up to 1/4": 2,
        "up to 1/2": 2,
        "up to 3/4": 2,
        "below all": 1,
        "always solved": 1,
    }
    assert result["by_task"]["t2"] == {"n": 8, "solved": 2, "mean": pytest.approx(0.475)}
    assert [name for name in result if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@8"]
    assert result["pass@1"]["mean"] == pytest.approx(0.5) and result["pass@8"]["mean"] == pytest.approx(8 / 9)
    assert result["teaching"] == pytest.approx(7 / 9)
    assert (result["tasks"], result["rollouts"]) == (9, 72)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=7), st.integers(2, 4))
def test_teaching_is_the_share_of_groups_that_differ(rewards: list[float], group_size: int) -> None:
    found = difficulty({"t": rewards}, group_size)["teaching"]
    groups = list(itertools.combinations(rewards, group_size))
    if groups:
        assert found == pytest.approx(sum(len(set(group)) > 1 for group in groups) / len(groups))
    else:
        assert found is None


def test_a_page_has_bars_in_proportion() -> None:
    rewards = {f"n{n}": [0.0, 0.0] for n in range(20)} | {f"s{n}": [1.0, 1.0] for n in range(5)} | {"m": [0.0, 1.0]}
    lines = list(page({"split": "train", **difficulty(rewards, 2), "lost": 1}))
    bars = {line.split("  ")[1].strip(): line.count("█") for line in lines if line.startswith("  ")}
    assert bars["never solved"] == 40 and bars["always solved"] == 10 and bars["up to 1/2"] == 2
    assert bars["up to 3/4"] == 0
    assert lines[0] == "26 tasks of train, 52 rollouts; solved in" and lines[-1].startswith("4% of groups of 2")
    assert "not graded   1 of the tasks" in lines
    few = list(page({"split": "val", **difficulty({"t": [0.5]}, 4), "lost": 0}))
    assert "--n" in few[-1]


def test_no_task_at_all() -> None:
    assert difficulty({}, 4)["teaching"] is None and list(page({"split": "train", **difficulty({}, 4), "lost": 3}))
