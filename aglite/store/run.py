"""What happened to the run as a whole: steps, policy versions, checkpoints, evaluations, phases, events, roll backs."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from typing import Any

from aglite.errors import StoreError
from aglite.store.base import StoreBase, insert
from aglite.store.calls import sample_row
from aglite.store.records import SampleRecord, pack_json
from aglite.store.rollback import roll_back


class RunStore(StoreBase):
    # writes

    async def set_meta(self, key: str, value: Any) -> None:
        """Keep anything that JSON can hold under a name."""
        body = pack_json(value)
        await self._write(lambda db: db.execute("REPLACE INTO meta (key, value) VALUES (?, ?)", (key, body)) and None)

    async def add_step(
        self,
        step: int,
        version: int,
        state: str,
        metrics: dict[str, Any],
        started_at: float,
        finished_at: float,
        *,
        samples: Iterable[SampleRecord] = (),
        fates: Mapping[str, str] | None = None,
        groups: Iterable[str] = (),
    ) -> None:
        """Record a training step, `applied` or `skipped`, in one commit with all that follows from it.

        `samples` are what it trained, `fates` what became of each rollout (id -> trained | baseline_only | stale) and
        `groups` the groups that it used up; an applied step makes its policy version known if it is not yet.
        """
        sample_rows = [sample_row(step, sample) for sample in samples]
        rollouts = [(step, fate, rollout_id) for rollout_id, fate in (fates or {}).items()]
        used = [(step, group_id) for group_id in groups]
        row = {
            "step": step,
            "version": version,
            "state": state,
            "metrics": pack_json(metrics),
            "started_at": started_at,
            "finished_at": finished_at,
        }

        def write(db: sqlite3.Connection) -> None:
            insert(db, "steps", row)
            for sample in sample_rows:
                insert(db, "samples", sample)
            db.executemany("UPDATE rollouts SET step = ?, fate = ? WHERE id = ?", rollouts)
            db.executemany("UPDATE groups SET state = 'trained', step = ? WHERE id = ?", used)
            if state == "applied":
                db.execute(
                    "INSERT OR IGNORE INTO policy_versions (version, step, state, created_at) VALUES (?, ?, 'live', ?)",
                    (version, step, finished_at),
                )

        await self._write(write)

    async def add_policy_version(self, version: int, step: int) -> None:
        """A new policy version, made by `step` (0: the model the run started from)."""
        row = {"version": version, "step": step, "state": "live", "created_at": time.time()}
        await self._write(lambda db: insert(db, "policy_versions", row))

    async def set_policy_version_state(self, version: int, state: str) -> None:
        await self._set("policy_versions", "version = ? AND state != 'rolled_back'", version, state)

    async def add_checkpoint(self, step: int, version: int, path: str) -> None:
        """A checkpoint that lies complete at `path`, in place of an earlier one there."""
        row = {"step": step, "version": version, "path": path, "state": "kept", "created_at": time.time()}

        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE checkpoints SET state = 'removed' WHERE path = ? AND state = 'kept'", (path,))
            insert(db, "checkpoints", row)

        await self._write(write)

    async def set_checkpoint_state(self, step: int, state: str) -> None:
        """`kept` or `removed`, of the step's newest checkpoint that is not rolled back."""
        newest = "id = (SELECT max(id) FROM checkpoints WHERE step = ? AND state != 'rolled_back')"
        await self._set("checkpoints", newest, step, state)

    async def start_evaluation(self, step: int, version: int, split: str = "val") -> int:
        row = {"step": step, "version": version, "split": split, "state": "running", "started_at": time.time()}
        return await self._write(lambda db: insert(db, "evaluations", row))

    async def finish_evaluation(self, id: int, state: str, result: dict[str, Any]) -> None:
        """`done` or `abandoned`, with the result."""
        values = (state, pack_json(result), time.time(), id)
        sql = "UPDATE evaluations SET state = ?, result = ?, finished_at = ? WHERE id = ?"
        await self._write(lambda db: db.execute(sql, values) and None)

    async def set_phase(self, phase: str, cause: str = "") -> None:
        """Begin a phase, which ends the one before."""
        now = time.time()
        row = {"phase": phase, "cause": cause, "started_at": now}

        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE phases SET finished_at = ? WHERE finished_at IS NULL", (now,))
            insert(db, "phases", row)

        await self._write(write)

    async def add_event(self, level: str, kind: str, text: str, data: dict[str, Any] | None = None) -> int:
        """Add to the event log; returns the event's cursor, which only ever grows."""
        row = {"at": time.time(), "level": level, "kind": kind, "text": text, "data": pack_json(data or {})}
        return await self._write(lambda db: insert(db, "events", row))

    async def roll_back(self, after_version: int, keep_groups: Iterable[str] = ()) -> dict[str, int]:
        """Take back all that followed policy version `after_version`; see `rollback.roll_back`."""
        kept = list(keep_groups)
        return await self._write(lambda db: roll_back(db, after_version, kept))

    async def _set(self, table: str, where: str, value: int, state: str) -> None:
        sql = f"UPDATE {table} SET state = ? WHERE {where}"

        def write(db: sqlite3.Connection) -> None:
            if not db.execute(sql, (state, value)).rowcount:
                raise StoreError(f"{table} has none of {value} that could become {state}")

        await self._write(write)

    # reads

    def meta(self, key: str, default: Any = None) -> Any:
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return default if row is None else json.loads(row["value"])

    def steps(self) -> list[dict[str, Any]]:
        """All steps in the order they were made, `rolled_back` ones among them."""
        return self._all("steps", "id", "metrics")

    def evaluations(self) -> list[dict[str, Any]]:
        return self._all("evaluations", "id", "result")

    def checkpoints(self) -> list[dict[str, Any]]:
        return self._all("checkpoints", "id")

    def policy_versions(self) -> list[dict[str, Any]]:
        return self._all("policy_versions", "version")

    def next_version(self) -> int:
        """The number for a new policy version: above every one ever used, rolled-back ones too."""
        sql = """SELECT max((SELECT coalesce(max(version), 0) FROM policy_versions),
                            (SELECT coalesce(max(version), 0) FROM steps),
                            (SELECT coalesce(max(version_max), 0) FROM calls)) + 1 AS version"""
        return self._rows(sql)[0]["version"]

    def phases(self, limit: int = 100) -> list[dict[str, Any]]:
        """The last phases in order."""
        rows = self._rows("SELECT * FROM phases ORDER BY id DESC LIMIT ?", (limit,))
        return [dict(row) for row in reversed(rows)]

    def events(self, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """The first events past cursor `after`, in order: {id, at, level, kind, text, data}."""
        rows = self._rows("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", (after, limit))
        return [{**dict(row), "data": json.loads(row["data"])} for row in rows]

    def last_event_id(self) -> int:
        """The cursor of the newest event, 0 when there is none."""
        return self._rows("SELECT coalesce(max(id), 0) AS id FROM events")[0]["id"]

    def _all(self, table: str, order: str, json_column: str | None = None) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self._rows(f"SELECT * FROM {table} ORDER BY {order}")]
        if json_column:
            for row in rows:
                row[json_column] = json.loads(row[json_column])
        return rows
