"""How many rollouts are in which state."""

from __future__ import annotations

from textual.content import Content

from aglite import units
from aglite.tui.feed import Snapshot
from aglite.tui.widgets.panel import Panel, lines

MARKS = {
    "queued": ("·", "$faint"),
    "starting": ("○", "$primary"),
    "running": ("●", "$primary"),
    "grading": ("◐", "$secondary"),
    "done": ("✓", "$success"),
    "failed": ("✗", "$accent"),
    "error": ("!", "$error"),
    "cancelled": ("–", "$faint"),
}
"""Mark and colour of each state, here and in the table."""


class QueueDepth(Panel):
    BORDER_TITLE = "queue"

    def show(self, snapshot: Snapshot) -> None:
        at_once = (snapshot.status or {}).get("concurrency")
        subtitle = f"{at_once} at once" if at_once else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        super().show(snapshot)

    def draw(self, width: int, height: int, now: float) -> Content:
        queue = (self.snapshot.status or {}).get("queue") or {}
        if height >= len(units.QUEUE):
            return self._tall(queue, width)
        return self._flat(queue, width, height)

    def _flat(self, queue: dict[str, int], width: int, height: int) -> Content:
        """States in a row; with little room closer together, then the ended ones without their names."""
        for gap, named in (("  ", units.QUEUE), (" ", units.QUEUE), (" ", units.UNFINISHED)):
            rows = self._rows(queue, width, gap, named)
            if len(rows) <= max(height, 1):
                break
        return lines(*rows[: max(height, 1)])

    def _rows(self, queue: dict[str, int], width: int, gap: str, named: tuple[str, ...]) -> list[Content]:
        """The states wrapped to `width`; ended ones with nothing in them are left out."""
        rows, line = [], Content("")
        for state in units.QUEUE:
            number = queue.get(state, 0)
            if not number and state not in units.UNFINISHED:
                continue
            mark, style = MARKS[state]
            item = Content.assemble(
                (mark + gap[1:], style),
                (str(number), "bold" if number else "$faint"),
                (f" {state}" if state in named else "", "$faint"),
            )
            if line.cell_length and 1 + line.cell_length + len(gap) + item.cell_length > width:
                rows.append(line)
                line = Content("")
            line = Content.assemble(line, gap if line.cell_length else " ", item)
        return [*rows, line]

    def _tall(self, queue: dict[str, int], width: int) -> Content:
        """A row a state, with a bar in proportion to the fullest."""
        most = max([queue.get(state, 0) for state in units.QUEUE] + [1])
        room = max(width - 20, 0)
        rows = []
        for state in units.QUEUE:
            number = queue.get(state, 0)
            mark, style = MARKS[state]
            length = max(round(number / most * room), 1) if number else 0
            rows.append(
                Content.assemble(
                    (f" {mark} ", style),
                    (f"{state:<10}", "" if number else "$faint"),
                    (f"{number:>5} ", "bold" if number else "$faint"),
                    ("━" * length, style),
                )
            )
        return lines(*rows)
