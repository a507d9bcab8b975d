"""What a writer is given: every point once, and all anew when some were taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracked import evaluation, roll_back, step

from aglite.store import Store
from aglite.tracking.follow import Follower
from aglite.tracking.points import About, Point, about, points


class Recorder:
    """A writer that remembers what was asked of it."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.opened: list[tuple[int, bool]] = []
        self.shown: list[tuple[int, str]] = []
        self.closed = 0

    def open(self, run: About, generation: int, fresh: bool) -> None:
        self.opened.append((generation, fresh))
        if fresh:
            self.shown.clear()

    def write(self, point: Point) -> None:
        self.shown.append((point.step, next(iter(point.values)).partition("/")[0]))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def test_points_name_what_holds(store: Store) -> None:
    evaluation(store, 0, 0.25)
    step(store, 1, 0.5)
    step(store, 2, 0.75)
    roll_back(store, 1)
    found = {(point.step, name): value for point in points(store) for name, value in point.values.items()}
    assert found == {
        (0, "validation/mean"): 0.25,
        (0, "validation/n"): 4,
        (0, "validation/pass@1.mean"): 0.25,
        (0, "validation/pass@1.low"): 0.0,
        (0, "validation/pass@1.high"): 1.0,
        (0, "validation/by_kind.word"): 0.25,
        (1, "train/reward_mean"): 0.5,
        (1, "train/forks.edited"): 1,
    }
    run = about(store)
    assert run.name == "words" and run.id.startswith("words-") and run.id == about(store).id
    assert run.settings == {"name": "words", "trainer.lr": 0.5, "agent.env": "(not shown)"}


def test_kinds_of_tasks_are_masked(store: Store) -> None:
    evaluation(store, 0, 0.25)
    store.sync(store.set_meta("redact", {"named": [], "patterns": ["word"]}))
    assert "validation/by_kind.[redacted]" in points(store)[0].values


def test_each_point_comes_once(store: Store) -> None:
    writer = Recorder(keeps=False)
    follower = Follower(store, writer, None)
    follower.catch_up()
    assert writer.opened == [(0, True)] and writer.shown == []
    step(store, 1, 0.5)
    follower.catch_up()
    follower.catch_up()
    evaluation(store, 1, 0.5)
    follower.catch_up()
    assert writer.shown == [(1, "train"), (1, "validation")] and len(writer.opened) == 1
    follower.close()
    assert writer.closed == 1


def test_what_was_taken_back_is_not_seen_any_more(store: Store) -> None:
    writer = Recorder(keeps=False)
    follower = Follower(store, writer, None)
    for number in (1, 2, 3):
        step(store, number, 0.5)
    follower.catch_up()
    roll_back(store, 1)
    follower.catch_up()
    assert writer.opened == [(0, True), (1, True)] and writer.closed == 1
    assert writer.shown == [(1, "train")]
    step(store, 2, 0.5)
    follower.catch_up()
    assert writer.shown == [(1, "train"), (2, "train")]


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_process_goes_on(store: Store, tmp_path: Path, keeps: bool) -> None:
    """A writer that keeps what it has is given the rest; another is given all anew."""
    writer, notes = Recorder(keeps), tmp_path / "notes" / "x.json"
    step(store, 1, 0.5)
    Follower(store, writer, notes).catch_up()
    step(store, 2, 0.5)
    Follower(store, writer, notes).catch_up()
    assert writer.shown == [(1, "train"), (2, "train")]
    assert writer.opened == [(0, True), (0, not keeps)]
    assert notes.exists() == keeps


def test_the_next_process_begins_anew_after_a_roll_back(store: Store, tmp_path: Path) -> None:
    writer, notes = Recorder(keeps=True), tmp_path / "x.json"
    step(store, 1, 0.5)
    step(store, 2, 0.5)
    Follower(store, writer, notes).catch_up()
    roll_back(store, 1)
    step(store, 2, 0.75)
    Follower(store, writer, notes).catch_up()
    assert writer.opened == [(0, True), (1, True)]
    assert writer.shown == [(1, "train"), (2, "train")]


def test_a_kill_in_the_middle_of_writing_doubles_nothing(store: Store, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Dying(Recorder):
        def write(self, point: Point) -> None:
            super().write(point)
            if len(self.shown) == 2:
                raise Killed

    writer, notes = Dying(keeps=True), tmp_path / "x.json"
    for number in (1, 2, 3):
        step(store, number, 0.5)
    with pytest.raises(Killed):
        Follower(store, writer, notes).catch_up()
    step(store, 4, 0.5)
    Follower(store, writer, notes).catch_up()
    assert writer.shown == [(1, "train"), (2, "train"), (4, "train")]
