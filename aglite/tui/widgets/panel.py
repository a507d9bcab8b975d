"""What the panels share: they draw a snapshot into their size, and repaint only what changed."""

from __future__ import annotations

from typing import ClassVar

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from aglite.tui.feed import Snapshot

NOTHING = Snapshot("connecting", None, [])


class Panel(Widget):
    """One region of the screen. A subclass gives `draw`."""

    TICKS: ClassVar = False
    """Whether it changes with the clock alone."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.snapshot = NOTHING
        self._drawn: Content | None = None
        self._next: tuple[Size, Content] | None = None
        """What is about to be drawn, and for which size."""

    def draw(self, width: int, height: int, now: float) -> Content:
        """The content for an area of `width` x `height` cells; lines must fit."""
        raise NotImplementedError

    def show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.tick()

    def tick(self) -> None:
        """Look at the clock again."""
        drawn = self._draw()
        if self._drawn is None or not drawn.is_same(self._drawn):
            self._next = self.size, drawn
            self.refresh()

    def render(self) -> Content:
        size, drawn = self._next or (None, None)
        self._drawn = drawn if drawn is not None and size == self.size else self._draw()
        self._next = None
        return self._drawn

    def _draw(self) -> Content:
        return self.draw(self.size.width, self.size.height, self.app.clock())  # type: ignore[attr-defined]


def lines(*parts: Content) -> Content:
    return Content("\n").join(parts)


def faint(text: str) -> Content:
    return Content.styled(text, "$faint")


def row(left: Content, right: Content, width: int) -> Content:
    """`left` and `right` at the two ends of a line; where both do not fit, `right` goes."""
    gap = width - left.cell_length - right.cell_length
    if gap < 1:
        return left.truncate(width, ellipsis=True)
    return Content.assemble(left, " " * gap, right)


def gauge(share: float, width: int, style: str) -> Content:
    """A filled bar: `▰▰▰▱▱`."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return Content.assemble(("▰" * full, style), ("▱" * (width - full), "$line"))
