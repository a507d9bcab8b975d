"""Everything that happened, and the event under the cursor in full."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.content import Content
from textual.widget import Widget

from aglite.headless import describe
from aglite.tui.feed import Snapshot
from aglite.tui.screens.run import NO_EVENTS
from aglite.tui.screens.view import View
from aglite.tui.stream import EventStream
from aglite.tui.widgets.events import KEPT, EventTable
from aglite.tui.widgets.pages import Pages, wrapped

TAKE_S = 1.0


class EventsScreen(View):
    NAME: ClassVar = "events"

    def body(self) -> Iterable[Widget]:
        yield EventTable(id="all-events")
        detail = Pages(id="event")
        detail.border_title = "event"
        yield detail

    def on_mount(self) -> None:
        self._stream = EventStream(self.app.source)
        self._link = ""
        self.set_interval(TAKE_S, self._take)

    def on_unmount(self) -> None:
        self._stream.stop()

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        if snapshot.link == "connecting":
            return
        if not self._stream.cursor:
            log = (snapshot.status or {}).get("log") or []
            self._stream.cursor = max(0, log[-1]["id"] - KEPT) if log else 0
        if snapshot.link == "live" or snapshot.link != self._link:
            self._stream.start()
        self._link = snapshot.link

    def _take(self) -> None:
        empty = self._stream.problem or NO_EVENTS.get(self._link or "connecting", "no event is recorded")
        self.query_one(EventTable).add(self._stream.take(), self.app.clock(), empty)

    def on_table_moved(self, message: EventTable.Moved) -> None:
        blocks = in_full(message.row) if message.row else []
        self.query_one("#event", Pages).read(wrapped(blocks))


def in_full(event: dict[str, Any]) -> list[Content]:
    """An event with all of its data."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    blocks = [
        Content.assemble((f"{at}  {event['kind']}  {event['level']}  number {event['id']}", "$faint")),
        Content(describe(event)),
    ]
    for key, value in (event.get("data") or {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        blocks.append(Content.assemble((f"{key}  ", "$faint"), text))
    return blocks
