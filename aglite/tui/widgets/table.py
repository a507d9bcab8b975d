"""A table for long lists that change. Draws only the lines in sight and repaints only those that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from aglite.tui.filter import matcher
from aglite.tui.keys import TABLE, bindings

if TYPE_CHECKING:
    from aglite.tui.app import AgliteApp

Row = dict[str, Any]
STYLES = ("head", "cursor", "faint", "text", "bold", "primary", "secondary", "success", "accent", "warning", "error")


@dataclass(frozen=True, slots=True)
class Column:
    """`need` is the table width from which the column is shown; a `width` of 0 shares what is left, up to `most`.
    `sort` gives what rows are sorted by; None: they are not sorted by this column."""

    name: str
    width: int
    right: bool = False
    need: int = 0
    most: int = 1000
    sort: Callable[[Row], Any] | None = None


class Table(ScrollView, can_focus=True):
    """Shows rows in the order given, or sorted, those that the filter lets through. With `follow` the cursor stays on
    the newest (the first; `TAIL`: the last), else on its row. A subclass gives COLUMNS, `cells`, `look`, `id_of` and,
    where there is more to see of a row, `open`."""

    COMPONENT_CLASSES: ClassVar = {f"table--{name}" for name in STYLES}
    BINDINGS = bindings(TABLE)
    COLUMNS: ClassVar[Sequence[Column]] = ()
    WHAT: ClassVar = "rows"
    TAIL: ClassVar = False

    if TYPE_CHECKING:

        @property
        def app(self) -> AgliteApp: ...

    follow: reactive[bool] = reactive(True)

    @dataclass
    class Moved(Message):
        """The cursor is on another row, or its row has changed; None: on none."""

        row: Row | None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.all: Sequence[Row] = ()
        self.rows: list[Row] = []
        self.cursor = 0
        self.empty = "reading …"
        self.query_text = ""
        self.sorted_by: Column | None = None
        self.downwards = True
        self._now = 0.0
        self._shown: dict[int, Any] = {}
        self._told: Row | None = None
        self._titles = ("", "")
        self._ground: Style | None = None

    # what a subclass gives

    def cells(self, row: Row) -> dict[str, str]:
        """The text of each column."""
        raise NotImplementedError

    def look(self, row: Row) -> dict[str, str]:
        """The style (one of STYLES) of those columns that are not drawn as plain text."""
        return {}

    def id_of(self, row: Row) -> Any:
        """What stays the same while the row changes."""
        return row["id"]

    def opens(self, row: Row) -> bool:
        """Whether there is more to see of a row."""
        return True

    async def open(self, row: Row) -> None:
        """Show what more there is of a row: it was chosen with enter or a second click."""
        raise NotImplementedError

    # what the screen calls

    def show(self, rows: Sequence[Row], now: float, empty: str) -> None:
        """Show new rows as of time `now`; `empty` is said when there are none."""
        self.all, self._now, self.empty = rows, now, empty
        self._arrange()

    def find(self, text: str) -> None:
        """Show only the rows that match (see `filter.matcher`)."""
        self.query_text = text
        self._arrange()

    def copied(self) -> str:
        return "" if self.selected is None else "\t".join(self.cells(self.selected).values())

    @property
    def selected(self) -> Row | None:
        return self.rows[self.cursor] if 0 <= self.cursor < len(self.rows) else None

    def move(self, to: int) -> None:
        """Put the cursor on row `to`; this ends following."""
        if not self.rows:
            return
        self.follow = False
        self.cursor = min(max(to, 0), len(self.rows) - 1)
        self._after()

    def _arrange(self) -> None:
        before = self.selected
        self.rows = list(self.all)
        if self.query_text.strip():
            match = matcher(self.query_text)
            self.rows = [row for row in self.rows if match(self.cells(row), row)]
        if self.sorted_by is not None and self.sorted_by.sort is not None:
            self.rows.sort(key=_comparable(self.sorted_by.sort), reverse=self.downwards)
        if self.follow or before is None:
            self.cursor = max(len(self.rows) - 1, 0) if self.TAIL else 0
        else:
            wanted = self.id_of(before)
            place = next((at for at, row in enumerate(self.rows) if self.id_of(row) == wanted), None)
            self.cursor = min(self.cursor, max(len(self.rows) - 1, 0)) if place is None else place
        self._measure()
        self._after(reveal=not self.follow)

    def _measure(self) -> None:
        """Note how long the list is. The screen is only laid out anew, which repaints all of it, where the scroll bar
        comes or goes."""
        before, size = self.virtual_size, Size(self.size.width, len(self.rows) + 1)
        to_end = self.TAIL and self.follow
        if size.width == before.width and self.show_vertical_scrollbar and size.height > self.size.height:
            self.set_reactive(Table.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = size.height
            self.scroll_to(y=self.max_scroll_y if to_end else min(self.scroll_y, self.max_scroll_y), animate=False)
            return
        if size != before:
            self.virtual_size = size
        if to_end:
            self.call_after_refresh(self.scroll_end, animate=False)

    def _after(self, *, reveal: bool = True) -> None:
        """What follows a change of rows or cursor."""
        self._entitle()
        if reveal:
            self._reveal()
        self._repaint_changed()
        if self.selected is not self._told:
            self._told = self.selected
            self.post_message(self.Moved(self.selected))

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self.cursor = max(len(self.rows) - 1, 0) if self.TAIL else 0
            self.scroll_to(y=self.max_scroll_y if self.TAIL else 0, animate=False)
        self._after(reveal=False)

    def _entitle(self) -> None:
        """Setting a title repaints the whole table, so that is only done when it says something new."""
        number = f" {len(self.rows)}" if len(self.rows) == len(self.all) else f" {len(self.rows)} of {len(self.all)}"
        title = self.WHAT + (number if self.all else "")
        parts = [
            f"find: {self.query_text.strip()}" if self.query_text.strip() else "",
            f"by {self.sorted_by.name} {'↓' if self.downwards else '↑'}" if self.sorted_by else "",
            "following" if self.follow and self.rows and not self.sorted_by else "",
        ]
        self._write_titles(title, " · ".join(part for part in parts if part))

    def _write_titles(self, title: str, subtitle: str) -> None:
        if (title, subtitle) != self._titles:
            self._titles = title, subtitle
            self.border_title, self.border_subtitle = title.replace("[", "\\["), subtitle.replace("[", "\\[")

    # drawing

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        if y == 0:
            strip = self._head(width)
        elif not self.rows:
            text = ("nothing matches" if self.all else self.empty) if y == 2 else ""
            strip = Strip([Segment(fit(f"  {text}" if text else "", width), self._style("faint"))])
        else:
            strip = self._line(self.scroll_offset.y + y - 1, width)
        if self._ground is None:
            self._ground = self.rich_style  # asks all that it lies on
        return strip.crop_extend(0, self.size.width, Style.null()).apply_style(self._ground)

    def _repaint_changed(self) -> None:
        """Refresh the lines in sight whose text or look is not what was drawn last."""
        for y in range(1, self.size.height):
            if self._key(self.scroll_offset.y + y - 1) != self._shown.get(y):
                self.refresh(Region(0, y, self.size.width, 1))

    def _key(self, index: int) -> Any:
        if not self.rows:
            return self.empty, bool(self.all)
        if index >= len(self.rows):
            return None
        return self.cells(self.rows[index]), self.look(self.rows[index]), index == self.cursor, self.has_focus

    def _line(self, index: int, width: int) -> Strip:
        key = self._shown[index - self.scroll_offset.y + 1] = self._key(index)
        if key is None:
            return Strip.blank(width)
        cells, look, here, _ = key
        base = self.get_component_rich_style("table--cursor") if here else Style.null()
        under = Style(bgcolor=base.bgcolor, bold=base.bold)
        gap = Segment("  " if width >= 90 else " ", base)
        segments = [Segment(" ", base)]
        for column, size in self._layout(width):
            style = self._style(look[column.name]) + under if column.name in look else base
            if here and look.get(column.name) in ("faint", "text"):
                style = base
            segments += [Segment(fit(cells[column.name], size, column.right), style), gap]
        return Strip(segments).crop_extend(0, width, base)

    def _head(self, width: int) -> Strip:
        gap = "  " if width >= 90 else " "
        segments = [Segment(" ")]
        for column, size in self._layout(width):
            name = "primary" if column is self.sorted_by else "head"
            segments.append(Segment(fit(column.name, size, column.right) + gap, self._style(name)))
        return Strip(segments).crop_extend(0, width, Style.null())

    def _layout(self, width: int) -> list[tuple[Column, int]]:
        """The columns shown at this width and how wide each is."""
        shown = [column for column in self.COLUMNS if width >= column.need]
        gaps = (2 if width >= 90 else 1) * len(shown) + 1
        left = width - gaps - sum(column.width for column in shown)
        flexible = [column for column in shown if not column.width]
        share, rest = divmod(max(left, 4 * len(flexible)), max(len(flexible), 1))
        wide = {column.name: min(share + (rest if column is flexible[-1] else 0), column.most) for column in flexible}
        return [(column, column.width or wide[column.name]) for column in shown]

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"table--{name}", partial=True)

    def _reveal(self) -> None:
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + self.size.height - 1:
            self.scroll_to(y=self.cursor - self.size.height + 2, animate=False)

    def notify_style_update(self) -> None:
        self._shown.clear()
        self._ground = None
        super().notify_style_update()

    # keys and mouse

    def action_cursor(self, by: int) -> None:
        self.move(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move(self.cursor + by * max(self.size.height - 2, 1))

    def action_edge(self, side: int) -> None:
        self.move(0 if side < 0 else len(self.rows) - 1)

    def action_follow(self) -> None:
        self.follow = not self.follow

    def action_sort(self, by: int) -> None:
        choices = [None, *(column for column, _ in self._layout(self.size.width) if column.sort)]
        self._sort(choices[(choices.index(self.sorted_by) + by) % len(choices)] if self.sorted_by in choices else None)

    def action_reverse(self) -> None:
        self.downwards = not self.downwards
        self._sort(self.sorted_by)

    def _sort(self, column: Column | None) -> None:
        self.sorted_by = column
        self._arrange()
        self.refresh()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "open" or (self.selected is not None and self.opens(self.selected))

    async def action_open(self) -> None:
        if self.selected is not None and self.opens(self.selected):
            await self.open(self.selected)

    def watch_scroll_y(self, old: float, new: float) -> None:
        super().watch_scroll_y(old, new)
        at_end = round(new) >= self.max_scroll_y if self.TAIL else round(new) <= 0
        if self.follow and not at_end and round(old) != round(new) and self.max_scroll_y:
            self.set_reactive(Table.follow, False)
            self._entitle()
        self.refresh()

    def on_focus(self) -> None:
        self._repaint_changed()

    def on_blur(self) -> None:
        self._repaint_changed()

    def on_resize(self, event: events.Resize) -> None:
        self._measure()
        self.refresh()

    async def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset_capture(self)
        index = self.scroll_offset.y + offset.y - 1
        if offset.y < 1:
            self._sort_at(offset.x)
        elif index < len(self.rows):
            again = index == self.cursor and event.chain > 1
            self.move(index)
            if again:
                await self.action_open()

    def _sort_at(self, x: int) -> None:
        """Sort by the column whose name was clicked, the other way round by a second click."""
        width = self.scrollable_content_region.width
        right = 1
        for column, size in self._layout(width):
            right += size + (2 if width >= 90 else 1)
            if x < right:
                if column.sort and column is self.sorted_by:
                    self.downwards = not self.downwards
                self._sort(column if column.sort else None)
                return


def _comparable(key: Callable[[Row], Any]) -> Callable[[Row], tuple[bool, Any]]:
    """What is not known comes last, whichever way it is sorted downwards."""

    def value(row: Row) -> tuple[bool, Any]:
        found = key(row)
        return (found is not None, found if found is not None else 0)

    return value


def fit(text: str, width: int, right: bool = False) -> str:
    """`text` in exactly `width` cells, with nothing in it that a terminal would obey."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, max(width, 0))
    blank = " " * (width - size)
    return blank + text if right else text + blank
