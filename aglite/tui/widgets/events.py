"""What happened, newest at the bottom; it follows unless scrolled back."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from aglite.headless import describe
from aglite.tui.keys import EVENTS, bindings
from aglite.tui.widgets.table import Column, Row, Table

KEPT = 5000
LEVELS = ("info", "warning", "error")
SIGNS = {"info": "", "warning": "▲", "error": "✗"}


def rollout_of(event: Row) -> str | None:
    """The rollout that an event is about, if it is about one."""
    data = event.get("data") or {}
    return data.get("id") or data.get("rollout") if event["kind"] == "rollout" else None


class EventTable(Table):
    BINDINGS = bindings(EVENTS)
    COLUMNS: ClassVar = (
        Column("time", 8),
        Column("", 1, sort=lambda row: LEVELS.index(row["level"])),
        Column("kind", 10, need=64, sort=lambda row: row["kind"]),
        Column("event", 0),
    )
    WHAT: ClassVar = "events"
    TAIL: ClassVar = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.level = "info"
        """The lowest that is shown."""
        self.events: list[Row] = []

    def add(self, new: Iterable[Row], now: float, empty: str) -> None:
        """Append those that are new, in order. A run that began anew numbers its events from 1 again."""
        new = list(new)
        last = self.events[-1]["id"] if self.events else 0
        if new and new[-1]["id"] < last:
            self.events, last = [], 0
        fresh = [event for event in new if event["id"] > last]
        if fresh or empty != self.empty:
            self.events = [*self.events, *fresh][-KEPT:]
            self._show(now, empty)

    def _show(self, now: float, empty: str) -> None:
        lowest = LEVELS.index(self.level)
        self.show([event for event in self.events if LEVELS.index(event["level"]) >= lowest], now, empty)

    def opens(self, row: Row) -> bool:
        return rollout_of(row) is not None

    async def open(self, row: Row) -> None:
        rollout_id = rollout_of(row)
        assert rollout_id is not None
        await self.app.open_rollout(rollout_id, self.app.snapshot.rows)

    def action_level(self) -> None:
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]
        self._show(self._now, self.empty)

    def _entitle(self) -> None:
        self.WHAT = {"info": "events", "warning": "warnings and errors", "error": "errors"}[self.level]  # type: ignore[misc]
        super()._entitle()

    def cells(self, row: Row) -> dict[str, str]:
        return {
            "time": time.strftime("%H:%M:%S", time.localtime(row["at"])),
            "": SIGNS[row["level"]],
            "kind": row["kind"],
            "event": " ".join(describe(row).split()),
        }

    def look(self, row: Row) -> dict[str, str]:
        style = {} if row["level"] == "info" else {"event": row["level"], "": row["level"]}
        return {"time": "faint", "kind": "faint"} | style
