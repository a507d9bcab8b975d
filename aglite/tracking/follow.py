"""Keeping one writer up with a run's database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from aglite.paths import RunDir, write_private
from aglite.store import Store
from aglite.tracking.points import About, Point, Tracker, about, points


class Writer(Protocol):
    """Where points go. What fails, raises."""

    keeps: bool
    """Whether a later process goes on with what is there; otherwise all is written anew, which is as good where it is
    quick and the points carry their own times."""

    def open(self, run: About, generation: int, fresh: bool) -> None:
        """`fresh`: nothing of this run is there, or what is there no longer holds and must not be seen any more.
        `generation` counts how often that was so."""
        ...

    def write(self, point: Point) -> None: ...

    def flush(self) -> None:
        """See that all that was written is where others read it."""
        ...

    def close(self) -> None: ...


def writer_of(tracker: Tracker, folder: Path) -> Writer:
    """The writer that puts its files into `folder`. Raises AgliteError where its library is not installed."""
    if tracker == "tensorboard":
        from aglite.tracking.to_tensorboard import TensorBoard

        return TensorBoard(folder)
    if tracker == "wandb":
        from aglite.tracking.to_wandb import Wandb

        return Wandb(folder)
    from aglite.tracking.to_trackio import Trackio

    return Trackio()


class Follower:
    """Gives a writer what it has not got yet, and starts it over when a roll back takes back what it has.

    A point is noted as written just before it is: a process that is killed may lose the last one, but none comes twice.
    """

    def __init__(self, store: Store, writer: Writer, notes: Path | None) -> None:
        """`notes`: where to keep what is written, for the next process; None: there will be none."""
        self._store = store
        self._writer = writer
        self._notes = notes if writer.keeps else None
        self._written: list[str] = []
        self._generation = 0
        self._open = False
        self._seen: tuple[int, ...] = ()
        if self._notes is not None and self._notes.exists():
            kept = json.loads(self._notes.read_text())
            self._written, self._generation = kept["written"], kept["generation"]

    def catch_up(self) -> None:
        seen = self._store.progress()
        if self._open and seen == self._seen:
            return
        current = points(self._store)
        taken_back = not {point.key for point in current}.issuperset(self._written)
        if taken_back:
            if self._open:
                self._writer.close()
            self._open, self._written, self._generation = False, [], self._generation + 1
        if not self._open:
            self._writer.open(about(self._store), self._generation, fresh=not self._written)
            self._open = True
        written = set(self._written)
        new = [point for point in current if point.key not in written]
        self._written += [point.key for point in new]
        self._note()
        for point in new:
            self._writer.write(point)
        self._writer.flush()
        self._seen = seen

    @property
    def count(self) -> int:
        """How many points the writer has."""
        return len(self._written)

    def close(self) -> None:
        if self._open:
            self._writer.close()

    def _note(self) -> None:
        if self._notes is not None:
            self._notes.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._notes, json.dumps({"generation": self._generation, "written": self._written}))


def follow(run_dir: RunDir, tracker: Tracker, ended: Callable[[], bool]) -> None:
    """Write what comes until `ended`, which waits a moment, says so, and then what is left."""
    folder = run_dir.tracking
    store = Store.open(run_dir.db, readonly=True)
    try:
        follower = Follower(store, writer_of(tracker, folder / tracker), folder / f"{tracker}.json")
        while True:
            last = ended()
            follower.catch_up()
            if last:
                break
        follower.close()
    finally:
        store.close()


def write_all(store: Store, tracker: Tracker, folder: Path) -> int:
    """Write a whole run at once; returns how many points it has."""
    writer = writer_of(tracker, folder)
    follower = Follower(store, writer, None)
    follower.catch_up()
    follower.close()
    return follower.count
