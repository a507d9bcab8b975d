"""The run on one screen: where it stands, its curves, what is busy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual import events
from textual.containers import Container
from textual.widget import Widget

from aglite.tui.feed import Snapshot
from aglite.tui.screens.view import View
from aglite.tui.widgets import curve
from aglite.tui.widgets.engine import EngineLoad
from aglite.tui.widgets.events import EventTable
from aglite.tui.widgets.host import HostLoad
from aglite.tui.widgets.phase import PhaseBar
from aglite.tui.widgets.queue import QueueDepth
from aglite.tui.widgets.rollouts import RolloutTable
from aglite.tui.widgets.table import Table
from aglite.tui.widgets.timeline import Timeline

EMPTY = {
    "connecting": "waiting for the supervisor …",
    "live": "No rollouts yet: they appear here as soon as the model is loaded.",
    "lost": "no rollouts known",
    "died": "no rollouts recorded",
    "ended": "no rollouts recorded",
}
TOWERING = 46
"""Lines from which there is room for the smaller curves in one column."""
NO_EVENTS = {"connecting": "waiting for the supervisor …", "live": "nothing has happened yet"}


class RunScreen(View):
    NAME: ClassVar = "run"

    def body(self) -> Iterable[Widget]:
        yield PhaseBar(id="phase")
        yield Timeline(id="timeline")
        with Container(id="run"):
            with Container(id="curves"):
                yield curve.reward()
                with Container(id="small-curves"):
                    yield curve.entropy()
                    yield curve.kl()
            with Container(id="busy"):
                with Container(id="meters"):
                    yield QueueDepth(id="queue")
                    with Container(id="load"):
                        yield EngineLoad(id="engine")
                        yield HostLoad(id="host")
                yield RolloutTable(id="rollouts")
                yield EventTable(id="events")

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height >= TOWERING, "-towering")

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self.query_one("#load").display = snapshot.link not in ("ended", "died")
        now = self.app.clock()
        self.query_one(RolloutTable).show(snapshot.rows, now, EMPTY[snapshot.link])
        log = (snapshot.status or {}).get("log") or []
        self.query_one(EventTable).add(log, now, NO_EVENTS.get(snapshot.link, "no event is recorded"))

    def finds(self) -> Table:
        return self.focused if isinstance(self.focused, EventTable) else self.query_one(RolloutTable)
