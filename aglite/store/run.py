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

EVENT_KEYS = frozenset({"state", "phase", "path", "group", "split", "kind"})
"""Keys of an event's data that are never masked: they say what it is about."""


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

        `samples` are what it trained, `fates` what became of each rollout (id -> trained | baseline_only | stale |
        set_aside) and `groups` the groups that it used up; an applied step makes its policy version known if it is not
        yet.
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

    async def add_checkpoint(self, step: int, version: int, path: str) -> None:
        """A checkpoint that lies complete at `path`, in place of an earlier one there."""
        row = {"step": step, "version": version, "path": path, "state": "kept", "created_at": time.time()}

        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE checkpoints SET state = 'removed' WHERE path = ? AND state = 'kept'", (path,))
            insert(db, "checkpoints", row)

        await self._write(write)

    async def set_checkpoint_state(self, step: int, state: str) -> None:
        """`kept` or `removed`, of the step's newest checkpoint that is not rolled back."""
        sql = """UPDATE checkpoints SET state = ?
                 WHERE id = (SELECT max(id) FROM checkpoints WHERE step = ? AND state != 'rolled_back')"""

        def write(db: sqlite3.Connection) -> None:
            if not db.execute(sql, (state, step)).rowcount:
                raise StoreError(f"there is no checkpoint of step {step} that could become {state}")

        await self._write(write)

    async def set_best_checkpoint(self, step: int) -> None:
        """The kept checkpoint of `step` did best in validation; no other one is the best any more."""
        sql = "UPDATE checkpoints SET best = (step = ? AND state = 'kept')"
        await self._write(lambda db: db.execute(sql, (step,)) and None)

    async def start_evaluation(self, step: int, version: int, split: str = "val") -> int:
        row = {"step": step, "version": version, "split": split, "state": "running", "started_at": time.time()}
        return await self._write(lambda db: insert(db, "evaluations", row))

    async def finish_evaluation(self, id: int, state: str, result: dict[str, Any]) -> None:
        """`done` or `abandoned`, with the result."""
        values = (state, pack_json(result), time.time(), id)
        sql = "UPDATE evaluations SET state = ?, result = ?, finished_at = ? WHERE id = ?"
        await self._write(lambda db: db.execute(sql, values) and None)

    async def set_phase(self, phase: str, cause: str = "") -> None:
        """Begin a phase, which ends the one before. That of a run which was killed is found open when the run starts
        again: it ended with the last sign of life."""
        now = time.time()
        killed_at = self.last_sign() if phase == "starting" else None
        cause = self.redactor.text(cause) if self.redactor else cause
        row = {"phase": phase, "cause": cause, "started_at": now}

        def write(db: sqlite3.Connection) -> None:
            if killed_at is not None:
                sql = """UPDATE phases SET finished_at = max(started_at, ?)
                         WHERE finished_at IS NULL AND phase != 'stopped'"""
                db.execute(sql, (killed_at,))
            db.execute("UPDATE phases SET finished_at = ? WHERE finished_at IS NULL", (now,))
            insert(db, "phases", row)

        await self._write(write)

    async def add_event(self, level: str, kind: str, text: str, data: dict[str, Any] | None = None) -> int:
        """Add to the event log; returns the event's cursor, which only ever grows."""
        if self.redactor:
            text, data = self.redactor.text(text), self.redactor.value(data or {}, EVENT_KEYS)
        row = {"at": time.time(), "level": level, "kind": kind, "text": text, "data": pack_json(data or {})}
        return await self._write(lambda db: insert(db, "events", row))

    async def roll_back(self, after_version: int, keep_groups: Iterable[str] = ()) -> dict[str, int]:
        """Take back all that followed policy version `after_version`; see `rollback.roll_back`."""
        kept = list(keep_groups)
        return await self._write(lambda db: roll_back(db, after_version, kept))

    # reads

    def last_sign(self) -> float | None:
        """The Unix time of the newest event, call or change of a rollout's state; None before the first."""
        sql = """SELECT max(at) AS at FROM (
                   SELECT * FROM (SELECT at FROM events ORDER BY id DESC LIMIT 1)
                   UNION ALL SELECT * FROM (SELECT finished_at AS at FROM calls ORDER BY id DESC LIMIT 1)
                   UNION ALL SELECT * FROM (SELECT at FROM rollout_states ORDER BY rowid DESC LIMIT 1))"""
        return self._rows(sql)[0]["at"]

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

    def phase_seconds(self) -> dict[str, float]:
        """How long each phase has lasted in all, the one under way until now."""
        sql = "SELECT phase, total(coalesce(finished_at, ?) - started_at) AS seconds FROM phases GROUP BY phase"
        return {row["phase"]: row["seconds"] for row in self._rows(sql, (time.time(),))}

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
