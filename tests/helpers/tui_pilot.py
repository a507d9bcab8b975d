"""The terminal UI in tests: with a clock that stands still, looking only when asked to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fake_daemon import NOW
from textual.pilot import Pilot

from aglite.paths import RunDir
from aglite.tui.app import AgliteApp


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
