from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from aglite.paths import RunDir
from aglite.tui.feed import Feed, Snapshot
from aglite.tui.widgets.notice import notice


def test_a_fault_of_the_feed_is_shown_and_looked_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the run must not end unseen: the numbers on the screen would stand still for ever."""
    answers: list[Any] = [{"step": 1}, KeyError("phase"), {"step": 2}]
    seen: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(RunDir(tmp_path), seen.put, interval_s=0.01)

    def status() -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(feed.client, "status", status)
    monkeypatch.setattr(feed.client, "rollouts", lambda **_: [])
    feed.start()
    first, broken, again = (seen.get(timeout=60) for _ in range(3))
    feed.stop()
    assert (first.link, first.status) == ("live", {"step": 1})
    assert (broken.link, broken.status) == ("lost", {"step": 1}), "the last that was heard stays"
    assert notice(broken) == ("KeyError: 'phase'", "warning")
    assert (again.link, again.status) == ("live", {"step": 2})
