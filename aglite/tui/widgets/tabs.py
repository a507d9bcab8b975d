"""The names of the screens, with their keys."""

from __future__ import annotations

from textual import events
from textual.content import Content

from aglite.tui.keys import SCREENS
from aglite.tui.widgets.panel import Panel


class Tabs(Panel):
    def __init__(self, current: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._current = current
        self._ends: list[tuple[int, str]] = []
        """Where each name ends, for the mouse."""

    def draw(self, width: int, height: int, now: float) -> Content:
        for gap, short in (("  ", False), ("", False), ("", True)):
            text = self._names(gap, short)
            if text.cell_length <= width:
                break
        return text.truncate(width)

    def _names(self, gap: str, short: bool) -> Content:
        text = Content("")
        self._ends = []
        for number, name in enumerate(SCREENS, 1):
            here = name == self._current
            title = name[:4] if short and not here else name.capitalize()
            key, style = ("bold $primary", "bold $cursor-text on $cursor") if here else ("$primary", "$faint")
            item = Content.assemble((f" {number} ", f"{key} on $cursor" if here else key), (f"{title} ", style))
            text = Content.assemble(text, item, gap)
            self._ends.append((text.cell_length, name))
        return text

    async def on_click(self, event: events.Click) -> None:
        for end, name in self._ends:
            if event.x < end:
                await self.app.action_go(name)  # type: ignore[attr-defined]
                return
