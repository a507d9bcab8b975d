"""Masking what is stored already. Tokens stay; messages that become equal become one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator

from aglite.redact import Redactor
from aglite.store.calls import digest_of, mask_json
from aglite.store.judge import KEYS as JUDGE_KEYS
from aglite.store.records import pack_json, pack_rows, unpack_rows
from aglite.store.rollouts import masked_task
from aglite.store.run import EVENT_KEYS

PAGE = 500
TEXTS = (
    ("calls", "id", "error"),
    ("rollouts", "seq", "cause"),
    ("rollout_states", "rowid", "cause"),
    ("phases", "id", "cause"),
    ("events", "id", "text"),
)
"""Plain texts: (table, its integer key, column)."""


def mask_stored(db: sqlite3.Connection, redactor: Redactor) -> dict[str, int]:
    """Mask the texts of every table; returns how many rows of each were changed (`messages`, `calls`, ...)."""
    changed = {"messages": _mask_messages(db, redactor), "tasks": 0}
    for table, key, column in TEXTS:
        changed[table] = changed.get(table, 0) + _mask_column(db, table, key, column, redactor.text)
    changed["judge_calls"] = 0
    for column in ("request", "reply"):
        changed["judge_calls"] += _mask_column(
            db, "judge_calls", "id", column, lambda text: pack_json(redactor.value(json.loads(text), JUDGE_KEYS))
        )
    changed["calls"] += _mask_column(db, "calls", "id", "request", lambda text: mask_json(text, redactor))

    def event_data(text: str) -> str:
        return pack_json(redactor.value(json.loads(text), EVENT_KEYS))

    changed["events"] += _mask_column(db, "events", "id", "data", event_data)
    for row in db.execute("SELECT split, id, row FROM tasks").fetchall():
        masked = pack_json(masked_task(json.loads(row["row"]), redactor))
        if masked != row["row"]:
            db.execute("UPDATE tasks SET row = ? WHERE split = ? AND id = ?", (masked, row["split"], row["id"]))
            changed["tasks"] += 1
    return changed


def _mask_messages(db: sqlite3.Connection, redactor: Redactor) -> int:
    changed = 0
    merged: dict[int, int] = {}
    for message_id, body in _pages(db, "messages", "id", "body"):
        masked = pack_json(redactor.message(json.loads(body)))
        if masked == body:
            continue
        changed += 1
        digest = digest_of(masked)
        same = db.execute("SELECT id FROM messages WHERE hash = ? AND id != ?", (digest, message_id)).fetchone()
        if same is None:
            db.execute("UPDATE messages SET hash = ?, body = ? WHERE id = ?", (digest, masked, message_id))
        else:
            merged[message_id] = same["id"]
            db.execute("DELETE FROM messages WHERE id = ?", (message_id,))
    if merged:
        _point_calls_to(db, merged)
    return changed


def _point_calls_to(db: sqlite3.Connection, merged: dict[int, int]) -> None:
    """Let every call name the message that took the place of another."""

    def kept(message_id: int) -> int:
        while message_id in merged:
            message_id = merged[message_id]
        return message_id

    rows = db.execute("SELECT id, new_messages, reply_message FROM calls").fetchall()
    for row in rows:
        ids = unpack_rows(row["new_messages"])
        messages = pack_rows(kept(message_id) for message_id in ids)
        reply = None if row["reply_message"] is None else kept(row["reply_message"])
        if (messages, reply) != (row["new_messages"], row["reply_message"]):
            db.execute(
                "UPDATE calls SET new_messages = ?, reply_message = ? WHERE id = ?", (messages, reply, row["id"])
            )


def _mask_column(db: sqlite3.Connection, table: str, key: str, column: str, mask) -> int:
    changed = 0
    for row_id, text in _pages(db, table, key, column):
        masked = mask(text)
        if masked != text:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (masked, row_id))
            changed += 1
    return changed


def _pages(db: sqlite3.Connection, table: str, key: str, column: str) -> Iterator[tuple[int, str]]:
    """Key and column of every row, read some at a time: rows are changed meanwhile."""
    last = -1
    sql = f"SELECT {key} AS key, {column} AS value FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT {PAGE}"
    while rows := db.execute(sql, (last,)).fetchall():
        for row in rows:
            yield row["key"], row["value"]
        last = rows[-1]["key"]
