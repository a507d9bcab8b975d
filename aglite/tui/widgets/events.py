"""What happened, newest at the bottom; it follows unless scrolled back."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from aglite.headless import describe
from aglite.tui.widgets.rollouts import fit

KEPT = 2000
LEVELS = {"info": "text", "warning": "warning", "error": "error"}


class EventLog(ScrollView, can_focus=False):
    COMPONENT_CLASSES: ClassVar = {"events--faint", "events--text", "events--warning", "events--error"}
    BORDER_TITLE = "events"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._events: list[dict[str, Any]] = []
        self._last = 0

    def show(self, log: list[dict[str, Any]]) -> None:
        """Append those events of `log` that are new. A run that began anew numbers its events from 1 again."""
        if log and log[-1]["id"] < self._last:
            self._events, self._last = [], 0
        new = [event for event in log if event["id"] > self._last]
        if not new:
            return
        at_end = self.scroll_offset.y >= self.max_scroll_y
        self._last = new[-1]["id"]
        self._events = [*self._events, *new][-KEPT:]
        self.virtual_size = Size(self.size.width, len(self._events))
        if at_end:
            self.call_after_refresh(self.scroll_end, animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        index = self.scroll_offset.y + y
        if index >= len(self._events):
            return Strip.blank(width).apply_style(self.rich_style)
        event = self._events[index]
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        head = f" {at} " if width < 60 else f" {at}  {event['kind']:<10} "
        text = " ".join(describe(event).split())
        style = self._style(LEVELS[event["level"]])
        return (
            Strip([Segment(head, self._style("faint")), Segment(fit(text, max(width - len(head), 1)), style)])
            .crop_extend(0, self.size.width, Style.null())
            .apply_style(self.rich_style)
        )

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"events--{name}", partial=True)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._events))
        self.call_after_refresh(self.scroll_end, animate=False)
        self.refresh()
