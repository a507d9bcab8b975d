"""Taking traffic out of a run: calls with their tokens, or only what was said in them. Rollouts stay with their
numbers.

What a run that goes on still needs is never taken: unfinished rollouts, groups that wait to be trained, groups that
were trained after the last checkpoint (a crash makes them untrained again), and an evaluation that is under way.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from aglite.store.records import pack_json, unpack_rows, without_detail, without_text
from aglite.store.rollouts import UNFINISHED

COUNTED = (
    "calls",
    "samples",
    "prompt_tokens",
    "sampled_tokens",
    "trained_tokens",
    "policy_version_min",
    "policy_version_max",
)
"""What a pruned rollout keeps of its traffic."""

_FINISHED = f"r.state NOT IN ({', '.join(repr(state) for state in UNFINISHED)})"

# A run that trains has a manifest; in others (serve, eval, run) no group waits for training.
_SPARED = """
(g.eval_id IS NOT NULL AND e.state = 'running')
OR (g.eval_id IS NULL AND EXISTS (SELECT 1 FROM meta WHERE key = 'manifest')
    AND (g.state IN ('open', 'complete')
         OR (g.state = 'trained' AND g.step > coalesce((SELECT max(step) FROM checkpoints WHERE state = 'kept'), 0))))
"""

_FIND = f"""
SELECT r.id, coalesce({_SPARED}, 0) AS spared FROM rollouts r
LEFT JOIN groups g ON g.id = r.group_id LEFT JOIN evaluations e ON e.id = g.eval_id
WHERE r.pruned IS NULL AND (:unfinished OR {_FINISHED})
AND (:before IS NULL OR coalesce(r.finished_at, r.created_at) < :before)
AND (:step IS NULL OR r.step <= :step) AND (:states IS NULL OR r.state IN (SELECT value FROM json_each(:states)))
ORDER BY r.seq
"""


@dataclass(slots=True)
class Found:
    """Rollouts that a rule applies to, by id; `spared` are those that training still needs."""

    rollouts: list[str]
    spared: list[str]


def find(
    db: sqlite3.Connection,
    *,
    before: float | None = None,
    step: int | None = None,
    states: Collection[str] | None = None,
    unfinished: bool = False,
) -> Found:
    """Rollouts with traffic that ended (or, `unfinished` ones too, began) before a time, belong to a step up to `step`,
    and are in one of `states`; None: any."""
    values = {
        "before": before,
        "step": step,
        "states": None if states is None else json.dumps(list(states)),
        "unfinished": unfinished,
    }
    rows = db.execute(_FIND, values).fetchall()
    return Found([row["id"] for row in rows if not row["spared"]], [row["id"] for row in rows if row["spared"]])


def remove_traffic(db: sqlite3.Connection, counted: Sequence[dict[str, Any]]) -> int:
    """Remove calls and samples of rollouts; `counted` are their JSON, of which the numbers stay. Returns the number of
    calls. Messages that nothing needs any more are another step: `unused_messages`."""
    removed = 0
    for rollout in counted:
        kept = pack_json({name: rollout[name] for name in COUNTED})
        key = (rollout["id"],)
        db.execute("DELETE FROM samples WHERE rollout_id = ?", key)
        db.execute("DELETE FROM judge_calls WHERE rollout_id = ?", key)
        removed += db.execute("DELETE FROM calls WHERE rollout_id = ?", key).rowcount
        db.execute("UPDATE rollouts SET pruned = ? WHERE id = ?", (kept, rollout["id"]))
        _shorten_causes(db, rollout["id"])
    _forget_external_tasks(db)
    return removed


def remove_text(db: sqlite3.Connection, rollouts: Sequence[str]) -> int:
    """Remove what was said and asked in the calls of rollouts; tokens and numbers stay. Returns the number of calls."""
    removed = 0
    columns = ("base_messages", "new_messages", "reply_message", "request", "error")
    sql = f"SELECT id, {', '.join(columns)} FROM calls WHERE rollout_id = ?"
    for rollout_id in rollouts:
        for row in db.execute(sql, (rollout_id,)).fetchall():
            request = pack_json(without_text(json.loads(row["request"])))
            kept = (0, b"", None, request, without_detail(row["error"]))
            if tuple(row[column] for column in columns) != kept:
                sets = ", ".join(f"{column} = ?" for column in columns)
                db.execute(f"UPDATE calls SET {sets} WHERE id = ?", (*kept, row["id"]))
                removed += 1
        for row in db.execute(
            "SELECT id, request, reply FROM judge_calls WHERE rollout_id = ?", (rollout_id,)
        ).fetchall():
            kept = [pack_json(without_text(json.loads(row[column]))) for column in ("request", "reply")]
            db.execute("UPDATE judge_calls SET request = ?, reply = ? WHERE id = ?", (*kept, row["id"]))
        _shorten_causes(db, rollout_id)
    return removed


def unused_messages(db: sqlite3.Connection) -> tuple[list[int], int]:
    """Messages that no call has, by id, and the newest call that was looked at. Reads every call's list of messages."""
    newest = db.execute("SELECT coalesce(max(id), 0) FROM calls").fetchone()[0]
    unused = {row["id"] for row in db.execute("SELECT id FROM messages")}
    unused -= _used_messages(db, 0)
    return sorted(unused), newest


def remove_messages(db: sqlite3.Connection, message_ids: Collection[int], newest_call: int) -> int:
    """Remove those of `unused_messages` that no call made use of since then."""
    unused = set(message_ids) - _used_messages(db, newest_call)
    db.executemany("DELETE FROM messages WHERE id = ?", [(message_id,) for message_id in sorted(unused)])
    return len(unused)


def _used_messages(db: sqlite3.Connection, after_call: int) -> set[int]:
    used: set[int] = set()
    for row in db.execute("SELECT new_messages, reply_message FROM calls WHERE id > ?", (after_call,)):
        used.update(unpack_rows(row["new_messages"]))
        if row["reply_message"] is not None:
            used.add(row["reply_message"])
    return used


def _shorten_causes(db: sqlite3.Connection, rollout_id: str) -> None:
    short = "substr(cause, 1, instr(cause || ':', ':') - 1)"  # as `without_detail` does
    db.execute(f"UPDATE rollouts SET cause = {short} WHERE id = ?", (rollout_id,))
    db.execute(f"UPDATE rollout_states SET cause = {short} WHERE rollout_id = ?", (rollout_id,))


def _forget_external_tasks(db: sqlite3.Connection) -> None:
    """Tasks that came with an external rollout, and not from the recipe's files, go with the last rollout of theirs."""
    db.execute(
        """UPDATE tasks SET row = json_object('id', id, 'public', json('{}'), 'hidden', json('{}'))
           WHERE EXISTS (SELECT 1 FROM rollouts r WHERE r.task_id = tasks.id AND r.split = tasks.split
                         AND r.backend = 'external' AND r.pruned IS NOT NULL)
           AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r.task_id = tasks.id AND r.split = tasks.split
                           AND (r.backend != 'external' OR r.pruned IS NULL))"""
    )
