from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fake_daemon import NOW, FakeDaemon, running
from recorded_run import recorded_run
from textual.pilot import Pilot

from aglite.paths import RunDir
from aglite.tui.app import AgliteApp


@pytest.fixture(autouse=True)
def fixed_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same time zone, folder names and colours everywhere, so that a picture is the same everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("COLORFGBG", raising=False)
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


def make_app(run_dir: RunDir) -> AgliteApp:
    """An app whose clock stands still and which looks at the run once, and again only when it is hurried."""
    return AgliteApp(run_dir, clock=lambda: NOW, interval_s=3600)


async def until(pilot: Pilot[Any], condition: Callable[[], Any], what: str) -> None:
    """Let the app work until something is so."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await pilot.pause(0.02)
    await pilot.pause()


def heard(link: str = "live") -> Callable[[Pilot[Any]], Awaitable[None]]:
    async def wait(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: pilot.app.snapshot.link == link, f"the link is {link}")

    return wait
