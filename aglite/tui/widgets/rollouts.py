"""The live table of rollouts. Draws only the lines in sight and repaints only those that changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from aglite import units
from aglite.tui.keys import RUN, bindings
from aglite.tui.rows import Row
from aglite.tui.widgets.queue import MARKS


@dataclass(frozen=True, slots=True)
class Column:
    """`need` is the table width from which the column is shown; a `width` of 0 shares what is left."""

    name: str
    width: int
    right: bool = False
    need: int = 0


COLUMNS = (
    Column("rollout", 8),
    Column("task", 0),
    Column("group", 8, need=110),
    Column("state", 11),
    Column("calls", 5, right=True, need=50),
    Column("smpl", 4, right=True, need=74),
    Column("tokens", 6, right=True, need=60),
    Column("reward", 6, right=True),
    Column("policy", 7, need=66),
    Column("time", 4, right=True),
    Column("cause", 0, need=120),
)


class RolloutTable(ScrollView, can_focus=True):
    """Shows `rows` in the order given. With `follow` the cursor stays on the first row, else on its rollout."""

    COMPONENT_CLASSES: ClassVar = {
        f"rollouts--{name}"
        for name in ("head", "cursor", "faint", "primary", "secondary", "success", "accent", "error")
    }
    BINDINGS = bindings(RUN)
    BORDER_TITLE = "rollouts"

    follow: reactive[bool] = reactive(True)

    @dataclass
    class Opened(Message):
        """A rollout was chosen with enter or a second click."""

        rollout_id: str

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: list[Row] = []
        self.cursor = 0
        self.empty = ""
        self._now = 0.0
        self._shown: dict[int, Any] = {}

    # what the screen calls

    def show(self, rows: list[Row], now: float, empty: str) -> None:
        """Show new rows as of time `now`; `empty` is said when there are none."""
        selected = self.selected
        self.rows, self._now, self.empty = rows, now, empty
        if self.follow or selected is None:
            self.cursor = 0
        else:
            places = {row["id"]: place for place, row in enumerate(rows)}
            self.cursor = places.get(selected, min(self.cursor, max(len(rows) - 1, 0)))
        size = Size(self.size.width, len(rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self._entitle()
        if not self.follow:
            self._reveal()
        self._repaint_changed()

    @property
    def selected(self) -> str | None:
        return self.rows[self.cursor]["id"] if 0 <= self.cursor < len(self.rows) else None

    def move(self, to: int) -> None:
        """Put the cursor on row `to`; this ends following."""
        if not self.rows:
            return
        self.follow = False
        self.cursor = min(max(to, 0), len(self.rows) - 1)
        self._entitle()
        self._reveal()
        self._repaint_changed()

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self.cursor = 0
            self.scroll_to(y=0, animate=False)
        self._entitle()
        self._repaint_changed()

    def _entitle(self) -> None:
        """Setting a title repaints the whole table, so only one that is new is set."""
        title = f"rollouts {len(self.rows)}" if self.rows else "rollouts"
        subtitle = "following" if self.follow and self.rows else ""
        if (title, subtitle) != (self.border_title, self.border_subtitle):
            self.border_title, self.border_subtitle = title, subtitle

    # drawing

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        if y == 0:
            strip = self._head(width)
        elif not self.rows:
            style = self._style("faint")
            text = f"  {self.empty}" if y == 2 else ""
            strip = Strip([Segment(fit(text, width), style)])
        else:
            strip = self._row(self.scroll_offset.y + y - 1, width)
        return strip.crop_extend(0, self.size.width, Style.null()).apply_style(self.rich_style)

    def _repaint_changed(self) -> None:
        """Refresh the lines in sight whose text or look is not what was drawn last."""
        for y in range(1, self.size.height):
            if self._key(self.scroll_offset.y + y - 1) != self._shown.get(y):
                self.refresh(Region(0, y, self.size.width, 1))

    def _key(self, index: int) -> Any:
        if not self.rows:
            return self.empty
        if index >= len(self.rows):
            return None
        return self._cells(self.rows[index]), index == self.cursor

    def _row(self, index: int, width: int) -> Strip:
        self._shown[index - self.scroll_offset.y + 1] = self._key(index)
        if index >= len(self.rows):
            return Strip.blank(width)
        row = self.rows[index]
        base = self.get_component_rich_style("rollouts--cursor") if index == self.cursor else Style.null()
        cells = self._cells(row)
        faint, color = self._style("faint"), self._style(MARKS[row["state"]][1].removeprefix("$"))
        styles = {"state": color, "group": faint, "smpl": faint, "policy": faint, "time": faint, "cause": faint}
        if row["state"] == "queued":
            styles = dict.fromkeys((column.name for column in COLUMNS), faint)
        if row["reward"] is not None:
            styles["reward"] = Style(bold=True)
        gap = Segment("  " if width >= 90 else " ", base)
        under = Style(bgcolor=base.bgcolor, bold=base.bold)
        segments = [Segment(" ", base)]
        for column, size in self._layout(width):
            style = styles.get(column.name)
            text = fit(cells[column.name], size, column.right)
            segments += [Segment(text, style + under if style else base), gap]
        return Strip(segments).crop_extend(0, width, base)

    def _head(self, width: int) -> Strip:
        style = self._style("head")
        gap = "  " if width >= 90 else " "
        text = " " + "".join(fit(column.name, size, column.right) + gap for column, size in self._layout(width))
        return Strip([Segment(fit(text, width), style)])

    def _cells(self, row: Row) -> dict[str, str]:
        mark = MARKS[row["state"]][0]
        until = row["finished_at"] if row["state"] in ("done", "failed", "error", "cancelled") else None
        began = row["started_at"] or row["created_at"]
        notes = [row["cause"], *row["flags"]]
        return {
            "rollout": row["id"][:8],  # enough for `aglite show`
            "task": row["task_id"] + (" (val)" if row["split"] == "val" else ""),
            "group": (row["group"] or "")[:8],
            "state": f"{mark} {row['state']}" + (f" {row['attempt']}" if row["attempt"] > 1 else ""),
            "calls": str(row["calls"]),
            "smpl": str(row["samples"] or ""),
            "tokens": units.count(row["sampled_tokens"]),
            "reward": units.reward(row["reward"]),
            "policy": units.versions(row),
            "time": units.age((until or self._now) - began),
            "cause": " · ".join(note for note in notes if note),
        }

    def _layout(self, width: int) -> list[tuple[Column, int]]:
        """The columns shown at this width and how wide each is."""
        shown = [column for column in COLUMNS if width >= column.need]
        gaps = (2 if width >= 90 else 1) * len(shown) + 1
        left = width - gaps - sum(column.width for column in shown)
        flexible = [column for column in shown if not column.width]
        share, rest = divmod(max(left, 4 * len(flexible)), len(flexible))
        return [(column, column.width or share + (rest if column is flexible[-1] else 0)) for column in shown]

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"rollouts--{name}", partial=True)

    def _reveal(self) -> None:
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + self.size.height - 1:
            self.scroll_to(y=self.cursor - self.size.height + 2, animate=False)

    # keys and mouse

    def action_cursor(self, by: int) -> None:
        self.move(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move(self.cursor + by * max(self.size.height - 2, 1))

    def action_edge(self, side: int) -> None:
        self.move(0 if side < 0 else len(self.rows) - 1)

    def action_follow(self) -> None:
        self.follow = not self.follow

    def action_open(self) -> None:
        if self.selected:
            self.post_message(self.Opened(self.selected))

    def watch_scroll_y(self, old: float, new: float) -> None:
        super().watch_scroll_y(old, new)
        if round(new) > 0 and self.cursor == 0:
            self.follow = False
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        y = event.get_content_offset_capture(self).y
        index = self.scroll_offset.y + y - 1
        if y < 1 or index >= len(self.rows):
            return
        if index == self.cursor and event.chain > 1:
            self.post_message(self.Opened(self.rows[index]["id"]))
        self.move(index)


def fit(text: str, width: int, right: bool = False) -> str:
    """`text` in exactly `width` cells, with nothing in it that a terminal would obey."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, max(width, 0))
    blank = " " * (width - size)
    return blank + text if right else text + blank
