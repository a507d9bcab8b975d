"""The terminal UI in tests: with a clock that stands still, looking only when asked to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fake_daemon import NOW
from textual._xterm_parser import XTermParser
from textual.pilot import Pilot

from aglite.paths import RunDir
from aglite.tui.app import AgliteApp
from aglite.tui.screens.events import EventsScreen
from aglite.tui.widgets.events import EventTable
from aglite.tui.widgets.table import Table


def make_app(run_dir: RunDir, *, readonly: bool = False) -> AgliteApp:
    """An app whose clock stands still and which looks at the run once, and again only when it is hurried."""
    return AgliteApp(run_dir, readonly=readonly, clock=lambda: NOW, interval_s=3600)


async def settled(pilot: Pilot[Any]) -> None:
    """Let the app work until no question is open, every table was told what it shows, all events are read, and what
    followed from it is drawn."""
    deadline, quiet = time.monotonic() + 60, 0
    while quiet < 4:  # an answer may lead to the next question
        assert time.monotonic() < deadline, f"never at rest: {busy(pilot)}"
        await pilot.pause(0.02)
        quiet = 0 if busy(pilot) else quiet + 1
    if isinstance(pilot.app.screen, EventsScreen):
        screen, daemon_has = pilot.app.screen, (pilot.app.snapshot.status or {}).get("log") or []
        table = screen.query_one(EventTable)
        await until(pilot, lambda: len(table.events) >= len(daemon_has), "all events are there")
    await pilot.pause()


def busy(pilot: Pilot[Any]) -> list[Any]:
    """What is still to come: workers, and tables in front that know neither rows nor why there are none."""
    workers = [worker for worker in pilot.app.workers if not worker.is_finished]
    return [*workers, *(table for table in pilot.app.screen.query(Table) if table.empty == "reading …")]


async def typed(pilot: Pilot[Any], text: str) -> None:
    """Give the app what a terminal sends, all at once, and let it work."""
    for event in XTermParser().feed(text):
        pilot.app._driver.process_message(event)
    await settled(pilot)


async def until(pilot: Pilot[Any], condition: Callable[[], Any], what: str) -> None:
    """Let the app work until something is so."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await pilot.pause(0.02)
    await pilot.pause()


def heard(link: str = "live") -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Wait until the link is so, and what came over it is drawn."""

    async def wait(pilot: Pilot[Any]) -> None:
        deadline, look = time.monotonic() + 60, time.monotonic() + 6
        while pilot.app.snapshot.link != link:
            assert time.monotonic() < deadline, f"waited in vain until the link is {link}"
            if time.monotonic() > look:  # the only look may have been given up on a machine that did not get to it
                pilot.app.feed.hurry()
                look += 6
            await pilot.pause(0.02)
        await settled(pilot)

    return wait
