from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import NOW, FakeDaemon, running
from recorded_run import recorded_run
from textual.widgets import Input

from aglite.paths import RunDir


@pytest.fixture(autouse=True)
def fixed_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same time zone, folder names and colours, and a cursor that does not blink, so that a picture is the same
    everywhere and at any time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setattr(Input, "_toggle_cursor", lambda self: None)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run_dir() -> RunDir:
    return RunDir(Path("runs/instruct"))


@pytest.fixture
def daemon(run_dir: RunDir) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(run_dir, running())
    yield daemon
    daemon.end()


@pytest.fixture
def finished() -> RunDir:
    return recorded_run(Path("runs/words"), now=NOW - 60)
