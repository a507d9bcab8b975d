"""The calls of a rollout, one a line, each with its place in the time the rollout took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from textual.message import Message

from aglite import units
from aglite.tui.widgets.table import Column, Row, Table


class TurnTable(Table):
    COLUMNS: ClassVar = (
        Column("#", 3, right=True),
        Column("how", 13, need=44),
        Column("tokens", 13, right=True, need=56),
        Column("policy", 6, need=76),
        Column("time", 0),
        Column("took", 7, right=True),
        Column("end", 9, need=66),
    )
    WHAT: ClassVar = "calls"

    @dataclass
    class Chosen(Message):
        """A call is to be seen in full."""

        row: Row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.set_reactive(Table.follow, False)
        self._span = (0.0, 1.0)

    def tell(self, detail: dict[str, Any], now: float) -> None:
        """Show the calls of a rollout in full."""
        calls = detail["call_rows"]
        numbers = {call["id"]: number for number, call in enumerate(calls, 1)}
        began = detail["started_at"] or detail["created_at"]
        ended = detail["finished_at"] or now
        self._span = (began, max([ended, began + 1e-3, *(call["finished_at"] or now for call in calls)]))
        rows = [{**call, "number": numbers[call["id"]], "how": how(call, numbers)} for call in calls]
        self.show(rows, now, "the agent has not called the model yet")

    async def open(self, row: Row) -> None:
        self.post_message(self.Chosen(row))

    def _write_titles(self, title: str, subtitle: str) -> None:
        super()._write_titles(title, "░ held  ▒ waited  █ sampled" if self.rows else subtitle)

    def cells(self, row: Row) -> dict[str, str]:
        width = next((size for column, size in self._layout(self._inner) if not column.width), 10)
        return {
            "#": str(row["number"]),
            "how": row["how"],
            "tokens": f"{units.count(row['prompt_tokens'])} → {units.count(row['sampled_tokens'])}",
            "policy": units.version_span([version for version, _ in row["versions"]]),
            "time": bar(row, self._span, width, self._now),
            "took": f"{(row['finished_at'] or self._now) - row['started_at']:.1f} s",
            "end": row["finish_reason"] if row["status"] == "ok" else row["status"],
        }

    @property
    def _inner(self) -> int:
        return self.scrollable_content_region.width

    def look(self, row: Row) -> dict[str, str]:
        style = {"#": "bold", "tokens": "faint", "policy": "faint", "time": "primary"}
        forked = row["fork_cause"] and row["number"] > 1
        return style | {"how": "accent" if forked else "faint", "end": "faint" if row["status"] == "ok" else "error"}


def how(call: dict[str, Any], numbers: dict[int, int]) -> str:
    """How a call follows from the earlier ones."""
    if call["fork_cause"]:
        return ("↱ " if numbers[call["id"]] > 1 else "") + call["fork_cause"].replace("_", " ")
    return f"continues {numbers.get(call['parent_id'], '?')}"


def bar(call: dict[str, Any], span: tuple[float, float], width: int, now: float) -> str:
    """A call on the time from `span[0]` to `span[1]`: the part held by the gate, the wait for the first token, and the
    sampling."""
    low, high = span

    def place(at: float) -> int:
        return min(max(round((at - low) / (high - low) * width), 0), width)

    started, ended = call["started_at"], call["finished_at"] or now
    first = call["first_token_at"] or ended
    held = min(started + call["held_s"], first)
    begin, end = place(started), max(place(ended), place(started) + 1)
    cells = [" "] * begin
    for column in range(begin, end):
        at = low + (column + 0.5) / width * (high - low)
        cells.append("░" if at < held else "▒" if at < first else "█")
    return "".join(cells)[:width]
