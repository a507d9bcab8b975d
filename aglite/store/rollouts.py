"""Tasks, groups and rollouts."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aglite.errors import NotFoundError, StoreError
from aglite.redact import Redactor
from aglite.store.base import StoreBase, columns_of, insert, update
from aglite.store.records import pack_json

UNFINISHED = ("queued", "starting", "running", "grading")
STATES = (*UNFINISHED, "done", "failed", "error", "cancelled")
GROUP_COLUMNS = frozenset({"size", "state", "refills", "step", "finished_at"})
ROLLOUT_COLUMNS = frozenset(
    {"token_hash", "exit_code", "reward", "breakdown", "flags", "step", "fate", "started_at", "finished_at"}
)
ROLLOUT_JSON = frozenset({"breakdown", "flags"})

PAGE_ROWS = 200

# Calls are added up over the covering index of the current attempt; the page is chosen first, so that a long run costs
# no more than what is shown of it.
PAGE = """
WITH page AS (SELECT * FROM rollouts {where} ORDER BY seq {order} LIMIT :limit)
SELECT page.*,
    count(c.rollout_id) AS calls, total(c.prompt_len) AS prompt_tokens, total(c.response_len) AS sampled_tokens,
    min(c.version_min) AS policy_version_min, max(c.version_max) AS policy_version_max,
    (SELECT count(*) FROM samples s WHERE s.rollout_id = page.id AND s.rolled_back = 0) AS samples,
    (SELECT total(s.trained_tokens) FROM samples s WHERE s.rollout_id = page.id AND s.rolled_back = 0) AS trained_tokens
FROM page LEFT JOIN calls c ON c.rollout_id = page.id AND c.attempt = max(page.attempt, 1)
GROUP BY page.seq ORDER BY page.seq {order}
"""


class RolloutStore(StoreBase):
    # writes

    async def add_tasks(self, split: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add `rows` ({"id", "public", "hidden"}) to the tasks of a split; one that is known by its id is replaced."""
        values = [{"split": split, "id": str(row["id"]), "row": pack_json(self.as_stored(row))} for row in rows]
        sql = """INSERT INTO tasks (split, id, position, row)
                 VALUES (:split, :id, (SELECT count(*) FROM tasks WHERE split = :split), :row)
                 ON CONFLICT (split, id) DO UPDATE SET row = excluded.row"""

        def write(db: sqlite3.Connection) -> None:
            db.executemany(sql, values)

        await self._write(write)

    async def add_group(
        self, id: str, task_id: str, split: str, size: int, eval_id: int | None = None, created_version: int = 0
    ) -> None:
        """Begin a group in state `open`."""
        row = {
            "id": id,
            "task_id": task_id,
            "split": split,
            "size": size,
            "state": "open",
            "eval_id": eval_id,
            "created_version": created_version,
            "created_at": time.time(),
        }
        await self._write(lambda db: insert(db, "groups", row))

    async def update_group(self, id: str, **columns: Any) -> None:
        """Set `size`, `state`, `refills`, `step` or `finished_at`."""
        values = columns_of(columns, GROUP_COLUMNS)
        await self._write(lambda db: update(db, "groups", id, values))

    async def add_rollout(self, id: str, task_id: str, group_id: str | None, split: str, backend: str) -> None:
        """Begin a rollout in state `queued`. An external one may have no group."""
        now = time.time()
        row = {
            "id": id,
            "task_id": task_id,
            "group_id": group_id,
            "split": split,
            "state": "queued",
            "backend": backend,
            "created_at": now,
        }

        def write(db: sqlite3.Connection) -> None:
            insert(db, "rollouts", row)
            _note_state(db, id, 0, "queued", "", now)

        await self._write(write)

    async def set_rollout_state(
        self, id: str, state: str, cause: str = "", attempt: int | None = None, **columns: Any
    ) -> None:
        """Change the state, and with it any of the columns that `update_rollout` takes, in one commit.

        Unless given, `started_at` is set by `starting`, for an attempt begins with it, and `finished_at` by a final
        state; one that is queued again has neither.
        """
        if state not in STATES:
            raise StoreError(f"{state!r} is no state of a rollout", f"one of {', '.join(STATES)}")
        values = columns_of(columns, ROLLOUT_COLUMNS, ROLLOUT_JSON)
        cause = self.redactor.text(cause) if self.redactor else cause
        now = time.time()

        def write(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT attempt FROM rollouts WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise StoreError(f"there is no rollout {id} in the store")
            number = row["attempt"] if attempt is None else attempt
            times: dict[str, Any] = {"finished_at": None if state in UNFINISHED else now}
            if state in ("queued", "starting"):
                times["started_at"] = now if state == "starting" else None
            update(db, "rollouts", id, {"state": state, "cause": cause, "attempt": number, **times, **values})
            _note_state(db, id, number, state, cause, now)

        await self._write(write)

    async def update_rollout(self, id: str, **columns: Any) -> None:
        """Set columns that are no state: token_hash, exit_code, reward, breakdown, flags, step, fate, times."""
        values = columns_of(columns, ROLLOUT_COLUMNS, ROLLOUT_JSON)
        await self._write(lambda db: update(db, "rollouts", id, values))

    def as_stored(self, row: dict[str, Any]) -> dict[str, Any]:
        """A task's row as `add_tasks` keeps it."""
        return masked_task(row, self.redactor) if self.redactor else row

    # reads

    def tasks(self, split: str) -> list[dict[str, Any]]:
        rows = self._rows("SELECT row FROM tasks WHERE split = ? ORDER BY position", (split,))
        return [json.loads(row["row"]) for row in rows]

    def task(self, split: str, id: str) -> dict[str, Any] | None:
        """One task's row."""
        row = self._row("SELECT row FROM tasks WHERE split = ? AND id = ?", (split, id))
        return None if row is None else json.loads(row["row"])

    def groups(self, state: str | None = None, split: str | None = None) -> list[dict[str, Any]]:
        """Groups in order of creation, all columns."""
        sql = """SELECT * FROM groups WHERE state = coalesce(?, state) AND split = coalesce(?, split)
                 ORDER BY created_at, id"""
        return [dict(row) for row in self._rows(sql, (state, split))]

    def rollout(self, id: str) -> dict[str, Any]:
        """The JSON of one rollout. Raises NotFoundError when there is none."""
        rows = self._page("WHERE id = :id", {"id": id})
        if not rows:
            raise NotFoundError(f"there is no rollout {id} in {self.path}", "`aglite rollouts` lists them")
        return _rollout_json(rows[0])

    def rollouts(
        self,
        state: str | Sequence[str] | None = None,
        step: int | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[dict[str, Any]]:
        """The JSON of rollouts, the newest first.

        `state`: one state or several; `step`: those trained in that step; `after`: the last id of the page before.
        """
        wheres, values = [], {}
        if state is not None:
            states = (state,) if isinstance(state, str) else tuple(state)
            wheres.append(f"state IN ({', '.join(f':state{number}' for number in range(len(states)))})")
            values |= {f"state{number}": name for number, name in enumerate(states)}
        if step is not None:
            wheres.append("step = :step")
            values["step"] = step
        if after is not None:
            wheres.append("seq < (SELECT seq FROM rollouts WHERE id = :after)")
            values["after"] = after
        where = f"WHERE {' AND '.join(wheres)}" if wheres else ""
        return [_rollout_json(row) for row in self._page(where, values, limit)]

    def each_rollout(self) -> Iterator[dict[str, Any]]:
        """The JSON of every rollout in order of creation, read a page at a time."""
        last = 0
        while rows := self._page("WHERE seq > :last", {"last": last}, limit=PAGE_ROWS, order="ASC"):
            last = rows[-1]["seq"]
            yield from map(_rollout_json, rows)

    def group_rollouts(self, group_id: str) -> list[dict[str, Any]]:
        """The rollouts of a group in order of creation: their JSON and `step`, `fate`, `exit_code` besides."""
        rows = self._page("WHERE group_id = :group_id", {"group_id": group_id}, order="ASC")
        return [
            {**_rollout_json(row), "step": row["step"], "fate": row["fate"], "exit_code": row["exit_code"]}
            for row in rows
        ]

    def task_rewards(self, split: str) -> list[dict[str, Any]]:
        """The reward of every graded rollout of whole groups, in order: {task_id, group_id, step, reward}.

        `step` is that which trained the group, of an evaluation's group that which was evaluated.
        """
        sql = """SELECT r.task_id, r.group_id, coalesce(e.step, g.step) AS step, r.reward
                 FROM rollouts r JOIN groups g ON g.id = r.group_id LEFT JOIN evaluations e ON e.id = g.eval_id
                 WHERE r.split = ? AND r.reward IS NOT NULL AND r.fate != 'rolled_back'
                       AND g.state IN ('complete', 'trained') AND (g.eval_id IS NULL OR e.state = 'done')
                 ORDER BY r.seq"""
        return [dict(row) for row in self._rows(sql, (split,))]

    def evaluation_rewards(self, eval_id: int) -> dict[str, list[float]]:
        """The rewards that the rollouts of each task got in an evaluation, by the task's id."""
        sql = """SELECT g.task_id, r.reward FROM groups g JOIN rollouts r ON r.group_id = g.id
                 WHERE g.eval_id = ? AND r.reward IS NOT NULL ORDER BY r.seq"""
        rewards: dict[str, list[float]] = {}
        for row in self._rows(sql, (eval_id,)):
            rewards.setdefault(row["task_id"], []).append(row["reward"])
        return rewards

    def rollout_states(self, id: str) -> list[dict[str, Any]]:
        """Every change of a rollout's state: {attempt, state, cause, at} in order."""
        sql = "SELECT attempt, state, cause, at FROM rollout_states WHERE rollout_id = ? ORDER BY rowid"
        return [dict(row) for row in self._rows(sql, (id,))]

    def counts_by_state(self, split: str | None = None) -> dict[str, int]:
        """How many rollouts are in each state; every state is there."""
        if split is None:
            rows = self._rows("SELECT state, count(*) AS n FROM rollouts GROUP BY state")
        else:
            rows = self._rows("SELECT state, count(*) AS n FROM rollouts WHERE split = ? GROUP BY state", (split,))
        return dict.fromkeys(STATES, 0) | {row["state"]: row["n"] for row in rows}

    def counts_by_cause(self, ids: Sequence[str] | None = None) -> dict[str, int]:
        """How many rollouts ended for each cause (its code, without what happened in particular), the most frequent
        first. `ids`: only these."""
        chosen = "" if ids is None else "AND id IN (SELECT value FROM json_each(?))"
        sql = f"""SELECT substr(cause, 1, instr(cause || ':', ':') - 1) AS code, count(*) AS n FROM rollouts
                  WHERE state IN ('failed', 'error', 'cancelled') AND cause != '' {chosen}
                  GROUP BY code ORDER BY n DESC, code"""
        rows = self._rows(sql, () if ids is None else (json.dumps(list(ids)),))
        return {row["code"]: row["n"] for row in rows}

    def _page(
        self, where: str, values: dict[str, Any], limit: int | None = None, order: str = "DESC"
    ) -> list[sqlite3.Row]:
        return self._rows(PAGE.format(where=where, order=order), {**values, "limit": -1 if limit is None else limit})


def masked_task(row: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """A task's row with all but its id masked."""
    return {key: value if key == "id" else redactor.value(value) for key, value in row.items()}


def _note_state(db: sqlite3.Connection, id: str, attempt: int, state: str, cause: str, at: float) -> None:
    row = {"rollout_id": id, "attempt": attempt, "state": state, "cause": cause, "at": at}
    insert(db, "rollout_states", row)


def _rollout_json(row: sqlite3.Row) -> dict[str, Any]:
    """The design's *JSON of a rollout*. That the training left it out or took it back shows among the flags."""
    flags = json.loads(row["flags"])
    if row["fate"] in ("stale", "set_aside", "rolled_back"):
        flags.append(row["fate"])
    if row["pruned"] is not None:
        flags.append("pruned")
    return {
        "id": row["id"],
        "task_id": row["task_id"],
        "group": row["group_id"],
        "split": row["split"],
        "state": row["state"],
        "cause": row["cause"],
        "attempt": row["attempt"],
        "backend": row["backend"],
        "calls": row["calls"],
        "samples": row["samples"],
        "prompt_tokens": int(row["prompt_tokens"]),
        "sampled_tokens": int(row["sampled_tokens"]),
        "trained_tokens": int(row["trained_tokens"]),
        "policy_version_min": row["policy_version_min"],
        "policy_version_max": row["policy_version_max"],
        "reward": row["reward"],
        "breakdown": json.loads(row["breakdown"]),
        "flags": flags,
        "created_at": row["created_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        **json.loads(row["pruned"] or "{}"),
    }
