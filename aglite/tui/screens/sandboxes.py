"""Where agents run at the moment, what that costs, and what outlived its rollout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from textual.widget import Widget

from aglite import units
from aglite.errors import AgliteError
from aglite.tui.feed import Snapshot
from aglite.tui.keys import SANDBOXES, bindings
from aglite.tui.screens.view import View
from aglite.tui.steer import RolloutActions
from aglite.tui.widgets.queue import MARKS
from aglite.tui.widgets.table import Column, Row, Table
from aglite.units import plain_json

POLL_S = 2.0
EMPTY = {
    "connecting": "waiting for the supervisor …",
    "live": "no agent runs at the moment",
    "lost": "the supervisor does not answer",
}


class SandboxTable(RolloutActions, Table):
    BINDINGS = bindings(SANDBOXES)
    ACTIONS: ClassVar = ("kill",)
    COLUMNS: ClassVar = (
        Column("rollout", 8),
        Column("task", 0, most=44, sort=lambda row: row["task_id"]),
        Column("state", 10, sort=lambda row: (row["leaked"], row["state"])),
        Column("age", 5, right=True, sort=lambda row: row["age_s"]),
        Column("try", 3, right=True, need=70, sort=lambda row: row["attempt"]),
        Column("where", 20, need=60),
        Column("procs", 5, right=True, need=90, sort=lambda row: row["processes"]),
        Column("CPU time", 8, right=True, need=100, sort=lambda row: row["cpu_s"]),
        Column("memory", 9, right=True, sort=lambda row: row["memory"]),
    )
    WHAT: ClassVar = "sandboxes"

    def chosen(self) -> Row | None:
        return self.selected

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "logs":
            return self.selected is not None and not self.selected["leaked"]
        if action == "shell":
            return self.app.can_steer and bool(self.selected) and has_agent(self.selected)
        return super().check_action(action, parameters)

    def id_of(self, row: Row) -> Any:
        return row["id"], row["pid"]

    def cells(self, row: Row) -> dict[str, str]:
        mark = "✗" if row["leaked"] else MARKS[row["state"]][0]
        place = (
            f"container {row['container'][:10]}" if row["container"] else f"process {row['pid']}" if row["pid"] else ""
        )
        return {
            "rollout": row["id"][:8],
            "task": row["task_id"] + (" (val)" if row["split"] == "val" else ""),
            "state": f"{mark} {row['state']}",
            "age": units.age(row["age_s"]),
            "try": str(row["attempt"] or ""),
            "where": place or str(row["backend"] or ""),
            "procs": "" if row["processes"] is None else str(row["processes"]),
            "CPU time": "" if row["cpu_s"] is None else f"{row['cpu_s']:.1f} s",
            "memory": "" if row["memory"] is None else units.size(row["memory"]),
        }

    def look(self, row: Row) -> dict[str, str]:
        state = "error" if row["leaked"] else MARKS[row["state"]][1].removeprefix("$")
        return {"state": state, "where": "faint", "try": "faint", "procs": "faint"}

    async def open(self, row: Row) -> None:
        await self.app.open_rollout(row["id"], self.rows)

    async def action_logs(self) -> None:
        if self.selected:
            await self.app.open_rollout(self.selected["id"], self.rows, page="output")

    def action_shell(self) -> None:
        if not (self.selected and has_agent(self.selected)):
            return
        where = ["--dir", str(self.app.run_dir.path)]
        with self.app.suspend():
            done = subprocess.run([sys.executable, "-m", "aglite", "shell", self.selected["id"], *where], check=False)
        if done.returncode:
            self.app.notify(f"the shell ended with code {done.returncode}", severity="warning")


class SandboxesScreen(View):
    NAME: ClassVar = "sandboxes"

    def body(self) -> Iterable[Widget]:
        yield SandboxTable(id="sandboxes")

    def on_mount(self) -> None:
        self.set_interval(POLL_S, self._ask)

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        if snapshot.link != "live":
            text = EMPTY.get(snapshot.link, "no supervisor runs, and no agent")
            self.query_one(SandboxTable).show([], self.app.clock(), text)
        elif not self.query_one(SandboxTable).all:
            self._ask()

    def _ask(self) -> None:
        if self.is_current and self.app.snapshot.link == "live":
            self.load(lambda run: plain_json(run.sandboxes()), self._tell)

    def _tell(self, rows: Sequence[Row]) -> None:
        rows = [{**row, "id": row["rollout_id"]} for row in rows]
        rows.sort(key=lambda row: (not row["leaked"], -row["age_s"]))
        self.query_one(SandboxTable).show(rows, self.app.clock(), EMPTY["live"])

    def problem(self, error: AgliteError) -> None:
        self.query_one(SandboxTable).show([], self.app.clock(), error.message)


def has_agent(row: Row) -> bool:
    """Whether there is an agent that a shell could be opened beside."""
    return row["state"] == "running" and not row["leaked"]
