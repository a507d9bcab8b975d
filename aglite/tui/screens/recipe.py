"""The recipe as it holds, key by key, and what of it differs from the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.content import Content
from textual.widget import Widget

from aglite.errors import AgliteError
from aglite.tui.feed import Snapshot
from aglite.tui.keys import RECIPE, bindings
from aglite.tui.screens.view import View
from aglite.tui.widgets.pages import Pages, wrapped
from aglite.tui.widgets.table import Column, Row, Table
from aglite.units import plain_json


class RecipeTable(Table):
    BINDINGS = bindings(RECIPE)
    COLUMNS: ClassVar = (
        Column("", 1, sort=lambda row: row["differs"]),
        Column("key", 31, sort=lambda row: row["key"]),
        Column("value", 0, most=40),
        Column("default", 0, most=30, need=70),
        Column("meaning", 0, need=150),
    )
    WHAT: ClassVar = "recipe"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.set_reactive(Table.follow, False)
        self.known: list[Row] = []
        self.only_differences = False

    def tell(self, rows: list[Row], now: float) -> None:
        self.known = rows
        chosen = [row for row in rows if row["differs"]] if self.only_differences else rows
        self.show(chosen, now, "the run has no recipe yet" if not rows else "everything is as by default")

    def action_differences(self) -> None:
        self.only_differences = not self.only_differences
        self.tell(self.known, self._now)

    def id_of(self, row: Row) -> Any:
        return row["key"]

    def opens(self, row: Row) -> bool:
        return False

    def cells(self, row: Row) -> dict[str, str]:
        return {
            "": "●" if row["differs"] else "",
            "key": row["key"],
            "value": written(row["value"]),
            "default": written(row["default"]) if row["differs"] else "",
            "meaning": row["meaning"],
        }

    def look(self, row: Row) -> dict[str, str]:
        faint = {"default": "faint", "meaning": "faint", "": "accent"}
        return faint | ({"value": "accent"} if row["differs"] else {"key": "faint", "value": "faint"})


class RecipeScreen(View):
    NAME: ClassVar = "recipe"

    def body(self) -> Iterable[Widget]:
        yield RecipeTable(id="recipe")
        meaning = Pages(id="meaning")
        meaning.border_title = "meaning"
        yield meaning

    def on_mount(self) -> None:
        self._asked = ""

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        if snapshot.link not in ("connecting", self._asked):
            self._asked = snapshot.link
            self.load(lambda run: plain_json(run.recipe()), self._tell)

    def _tell(self, rows: list[Row]) -> None:
        self.query_one(RecipeTable).tell(rows, self.app.clock())

    def problem(self, error: AgliteError) -> None:
        if not self.query_one(RecipeTable).known:
            self.query_one(RecipeTable).show([], 0.0, error.message)

    def on_table_moved(self, message: RecipeTable.Moved) -> None:
        row = message.row
        blocks = []
        if row is not None:
            default = Content.assemble((" default ", "$faint"), written(row["default"])) if row["differs"] else ""
            blocks = [
                Content.assemble((row["key"], "bold"), ("  ", ""), (written(row["value"]), "$accent"), "  ", default),
                Content(row["meaning"]),
            ]
        self.query_one("#meaning", Pages).read(wrapped(blocks))


def written(value: Any) -> str:
    """A value as in a recipe."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
