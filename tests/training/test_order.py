"""The order of tasks, and those that rest."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from aglite.config import Tasks
from aglite.training.order import TaskOrder
from aglite.training.state import LoopState

ROWS = [{"id": name, "public": {}, "hidden": {}} for name in "abcdef"]


def order(seed: int = 0, **settings: int) -> TaskOrder:
    return TaskOrder(ROWS, seed, Tasks(train="t", val="v", **settings))


def epoch(tasks: TaskOrder, state: LoopState) -> list[str]:
    """The rest of the epoch that the next task is in."""
    found = [tasks.next(state)["id"]]
    now = (state.cursor - 1) // len(ROWS)
    while state.cursor // len(ROWS) == now:
        ahead = LoopState(**asdict(state))
        name = tasks.next(ahead)["id"]
        if (ahead.cursor - 1) // len(ROWS) != now:
            break
        state.cursor = ahead.cursor
        found.append(name)
    return found


def test_every_epoch_is_a_shuffle_that_the_seed_decides() -> None:
    state, other = LoopState(), LoopState()
    epochs = [[order(3).next(state)["id"] for _ in ROWS] for _ in range(3)]
    assert all(sorted(each) == list("abcdef") for each in epochs) and len({tuple(each) for each in epochs}) > 1
    again = order(3)
    assert [again.next(other)["id"] for _ in range(18)] == [name for each in epochs for name in each]
    third = LoopState()
    fourth = order(4)
    assert [fourth.next(third)["id"] for _ in range(18)] != [name for each in epochs for name in each]


def test_a_solved_task_rests_and_is_tried_again() -> None:
    tasks, state = order(rest_solved_after=2, rest_epochs=2), LoopState()
    epoch(tasks, state)
    assert tasks.note(state, "a", [1.0, 1.0]) == ""
    assert "a" in epoch(tasks, state)
    assert tasks.note(state, "a", [1.0, 1.0]) == "solved by every rollout of 2 groups in a row"
    assert tasks.resting(state) == ["a"]
    assert sorted(epoch(tasks, state)) == sorted(epoch(tasks, state)) == list("bcdef")
    assert tasks.resting(state) == []
    assert "a" in epoch(tasks, state)
    # one more success and it rests again; one failure, and it needs two
    assert "3 groups in a row" in tasks.note(state, "a", [1.0, 1.0])
    assert tasks.note(state, "a", [1.0, 0.0]) == "" and not state.resting and not state.streaks
    assert tasks.note(state, "a", [1.0, 1.0]) == ""


def test_a_hopeless_task_rests_but_not_one_whose_rollouts_differ() -> None:
    tasks, state = order(rest_unsolved_after=1, rest_epochs=1), LoopState()
    epoch(tasks, state)
    assert tasks.note(state, "b", [0.0, 0.5]) == "" and tasks.note(state, "b", [1.0, 1.0]) == ""
    assert tasks.note(state, "b", [0.5, 0.5]) == "not solved by any rollout of its last group"
    assert sorted(epoch(tasks, state)) == list("acdef")
    assert sorted(epoch(tasks, state)) == list("abcdef")


def test_by_default_nothing_rests() -> None:
    tasks, state = order(), LoopState()
    for _ in range(9):
        assert tasks.note(state, "a", [1.0, 1.0]) == tasks.note(state, "b", [0.0, 0.0]) == ""
    assert state.resting == {} and sorted(epoch(tasks, state)) == list("abcdef")


def test_when_all_rest_the_run_goes_on_all_the_same() -> None:
    tasks, state = order(rest_solved_after=1, rest_epochs=9), LoopState()
    epoch(tasks, state)
    for row in ROWS:
        tasks.note(state, row["id"], [1.0])
    assert len({tasks.next(state)["id"] for _ in range(3)}) >= 1
    assert state.cursor < 6 * 30


@pytest.mark.parametrize("at", [1, 7, 20])
def test_a_state_from_a_checkpoint_goes_on_exactly(at: int) -> None:
    tasks, state = order(rest_solved_after=1, rest_unsolved_after=2), LoopState()

    def step(tasks: TaskOrder, state: LoopState) -> str:
        name = tasks.next(state)["id"]
        tasks.note(state, name, {"a": [1.0, 1.0], "b": [0.0, 0.0]}.get(name, [0.0, 1.0]))
        return name

    for _ in range(at):
        step(tasks, state)
    copy, other = LoopState(**asdict(state)), order(rest_solved_after=1, rest_unsolved_after=2)
    assert [step(tasks, state) for _ in range(30)] == [step(other, copy) for _ in range(30)]
    assert copy == state
