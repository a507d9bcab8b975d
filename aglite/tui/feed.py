"""Watches a run from a thread of its own and hands the UI one snapshot after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

from aglite.client import ControlClient, ControlError
from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.stored import StoredRun
from aglite.tui.rows import KEPT, Rows
from aglite.units import plain_json

Link = Literal["connecting", "live", "lost", "died", "ended"]
"""`lost`: the supervisor is there but does not answer; `died`: it is gone without a word; `ended`: it is gone."""

INTERVAL_S = 1.0
FULL_EVERY = 30
"""Polls between two readings of all rows."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of the run. `status` None: nothing was ever heard; after a loss it is the last one heard."""

    link: Link
    status: dict[str, Any] | None
    rows: list[dict[str, Any]]
    problem: str = ""
    heard_at: float = 0.0


class Feed:
    """Polls the supervisor; when it is gone, reads the database; when it is back, polls it again."""

    def __init__(
        self,
        run_dir: RunDir,
        deliver: Callable[[Snapshot], None],
        *,
        clock: Callable[[], float] = time.time,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.client = ControlClient(run_dir, timeout=5.0)
        self._run_dir = run_dir
        self._deliver = deliver
        self._clock = clock
        self._interval_s = interval_s
        self._rows = Rows()
        self._polls = 0
        self._snapshot = Snapshot("connecting", None, [])
        self._ended = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._hurry.set()

    def hurry(self) -> None:
        """Look again at once: something was just asked of the supervisor."""
        self._hurry.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                snapshot = self._look()
            except Exception as error:  # a fault of ours: the screen says so, where it would stand still for ever
                problem = f"{type(error).__name__}: {error}"
                snapshot = replace(self._snapshot, link="lost", problem=problem)
            if snapshot is not None and not self._ended.is_set():
                self._snapshot = snapshot
                self._deliver(snapshot)
            self._hurry.wait(self._interval_s)
            self._hurry.clear()

    def _look(self) -> Snapshot | None:
        """The next snapshot, or None when a run that has ended is still as it was read."""
        try:
            return self._ask()
        except ControlError as error:
            if error.reason in ("absent", "dead"):
                link: Link = "ended" if error.reason == "absent" else "died"
                return None if self._snapshot.link == link else self._read(link, error)
            return self._lost(error)

    def _ask(self) -> Snapshot:
        status = plain_json(self.client.status())
        everything = self._polls % FULL_EVERY == 0 or self._snapshot.link != "live"
        if everything:
            self._rows.clear()
        self._rows.merge(self.client.rollouts(limit=KEPT if everything else self._rows.wanted()))
        self._polls += 1
        return Snapshot("live", status, self._rows.ordered, "", self._clock())

    def _read(self, link: Link, error: ControlError) -> Snapshot:
        problem = str(error) if link == "died" else ""
        last = self._snapshot
        if not self._run_dir.db.exists():
            return Snapshot(link, _over(last.status), last.rows, problem, last.heard_at)
        try:
            with closing(StoredRun(self._run_dir)) as stored:
                status = plain_json(stored.status())
                self._rows.clear()
                self._rows.merge(stored.rollouts(limit=KEPT))
        except AgliteError as unreadable:
            return Snapshot(link, _over(last.status), last.rows, str(unreadable), last.heard_at)
        return Snapshot(link, status, self._rows.ordered, problem, self._clock())

    def _lost(self, error: ControlError) -> Snapshot:
        last = self._snapshot
        problem = error.message if error.reason == "refused" else ""
        return Snapshot("lost", last.status, last.rows, problem, last.heard_at)


def _over(status: dict[str, Any] | None) -> dict[str, Any] | None:
    """The last status that was heard, without what ended with the supervisor."""
    if status is None:
        return None
    return {**status, "pid": None, "phase": "stopped", "phase_since": None, "gate": None, "engine": None, "eta_s": None}
