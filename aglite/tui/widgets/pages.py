"""Long text to scroll through and search in. Laid out for the width that there is; draws only the lines in sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.content import Content
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

Layout = Callable[[int], Sequence[Content]]
"""From a width in cells to lines that fit."""


class Pages(ScrollView, can_focus=True):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._layout_of: Layout = lambda width: []
        self._lines: Sequence[Content] = []
        self._sought = ""
        self._hits: list[int] = []
        self._hit = -1

    def read(self, layout: Layout, *, keep: bool = False) -> None:
        """Show other text, from its beginning, or (`keep`) from where one was, at the end if that was the end."""
        at_end = self.max_scroll_y > 0 and self.scroll_offset.y >= self.max_scroll_y
        self._layout_of = layout
        self._relayout()
        if not keep:
            self.scroll_to(y=0, animate=False)
        elif at_end:
            self.call_after_refresh(self.scroll_end, animate=False)

    def find(self, text: str) -> None:
        """Mark `text`, whatever its case, and go to where it is next."""
        self._sought, self._hit = text.strip().lower(), -1
        self._search()
        if self._hits:
            top = self.scroll_offset.y
            self._hit = next((at for at, line in enumerate(self._hits) if line >= top), 0)
            self._reveal()
        self._entitle()
        self.refresh()

    def find_next(self, by: int) -> None:
        if self._hits:
            self._hit = (self._hit + by) % len(self._hits)
            self._reveal()
            self._entitle()
            self.refresh()

    def copied(self) -> str:
        """All of the text."""
        return "\n".join(line.plain.rstrip() for line in self._lines).strip()

    def go(self, line: int) -> None:
        self.scroll_to(y=line, animate=False)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        index = self.scroll_offset.y + y
        if index >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        line = self._lines[index]
        if self._sought:
            line = self._marked(line, index)
        strips = Visual.to_strips(self, line, width, 1, self.visual_style, apply_selection=False)
        strip = strips[0] if strips else Strip.blank(width)
        return strip.crop_extend(0, self.size.width, self.rich_style)

    def on_resize(self, event: events.Resize) -> None:
        self._relayout()

    def _relayout(self) -> None:
        width = self.scrollable_content_region.width
        self._lines = self._layout_of(width) if width > 0 else []
        self.virtual_size = Size(self.size.width, len(self._lines))
        self._search()
        self.refresh()

    def _search(self) -> None:
        self._hits = [at for at, line in enumerate(self._lines) if self._sought and self._sought in line.plain.lower()]

    def _marked(self, line: Content, index: int) -> Content:
        text, at = line.plain.lower(), -1
        here = self._hits and 0 <= self._hit < len(self._hits) and self._hits[self._hit] == index
        while (at := text.find(self._sought, at + 1)) >= 0:
            line = line.stylize("$background on $warning" if here else "reverse", at, at + len(self._sought))
        return line

    def _reveal(self) -> None:
        self.scroll_to(y=max(self._hits[self._hit] - self.size.height // 3, 0), animate=False)

    def _entitle(self) -> None:
        if not self._sought:
            self.border_subtitle = ""
        else:
            self.border_subtitle = f"{self._hit + 1} of {len(self._hits)} lines" if self._hits else "not found"


def wrapped(blocks: Sequence[Content]) -> Layout:
    """Blocks of text one below the other, wrapped."""
    return lambda width: [line for block in blocks for line in (block.wrap(max(width, 2)) or [Content("")])]
