"""The live table of rollouts."""

from __future__ import annotations

from typing import ClassVar

from aglite import units
from aglite.tui.keys import ROLLOUTS, bindings
from aglite.tui.steer import RolloutActions
from aglite.tui.widgets.queue import MARKS
from aglite.tui.widgets.table import Column, Row, Table

COLUMNS = (
    Column("rollout", 8),
    Column("task", 0, most=44, sort=lambda row: row["task_id"]),
    Column("group", 8, need=112, sort=lambda row: row["group"]),
    Column("state", 11, sort=lambda row: units.QUEUE.index(row["state"])),
    Column("age", 4, right=True, sort=lambda row: -row["created_at"], need=84),
    Column("ran", 4, right=True, sort=lambda row: (row["finished_at"] or 1e12) - (row["started_at"] or 1e12)),
    Column("calls", 5, right=True, need=50, sort=lambda row: row["calls"]),
    Column("smpl", 4, right=True, need=74, sort=lambda row: row["samples"]),
    Column("tokens", 6, right=True, need=60, sort=lambda row: row["sampled_tokens"]),
    Column("policy", 7, need=66, sort=lambda row: row["policy_version_min"]),
    Column("reward", 6, right=True, sort=lambda row: row["reward"]),
    Column("cause and flags", 0, need=100, sort=lambda row: row["cause"] or None),
)


class RolloutTable(RolloutActions, Table):
    BINDINGS = bindings(ROLLOUTS)
    COLUMNS: ClassVar = COLUMNS
    WHAT: ClassVar = "rollouts"

    def chosen(self) -> Row | None:
        return self.selected

    async def open(self, row: Row) -> None:
        await self.app.open_rollout(row["id"], self.rows)

    def cells(self, row: Row) -> dict[str, str]:
        began = row["started_at"]
        notes = [row["cause"], *row["flags"]]
        return {
            "rollout": row["id"][:8],  # enough for `aglite show`
            "task": row["task_id"] + (" (val)" if row["split"] == "val" else ""),
            "group": (row["group"] or "")[:8],
            "state": f"{MARKS[row['state']][0]} {row['state']}" + (f" {row['attempt']}" if row["attempt"] > 1 else ""),
            "age": units.age(self._now - row["created_at"]),
            "ran": units.age((row["finished_at"] or self._now) - began) if began else "",
            "calls": str(row["calls"]),
            "smpl": str(row["samples"] or ""),
            "tokens": units.count(row["sampled_tokens"]),
            "policy": units.versions(row),
            "reward": units.reward(row["reward"]),
            "cause and flags": " · ".join(note for note in notes if note),
        }

    def look(self, row: Row) -> dict[str, str]:
        if row["state"] == "queued":
            return dict.fromkeys((column.name for column in COLUMNS), "faint")
        faint = dict.fromkeys(("group", "age", "ran", "smpl", "policy", "cause and flags"), "faint")
        state = {"state": MARKS[row["state"]][1].removeprefix("$")}
        return faint | state | ({"reward": "bold"} if row["reward"] is not None else {"reward": "faint"})
