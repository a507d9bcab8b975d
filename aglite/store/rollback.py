"""Going back to a checkpoint: what came after it is kept for reading and never trained."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from aglite.store.base import insert

UNFINISHED = "('queued', 'starting', 'running', 'grading')"


def roll_back(db: sqlite3.Connection, after_version: int, keep_groups: Sequence[str]) -> dict[str, int]:
    """Mark as `rolled_back` all that came after the checkpoint of policy version `after_version`.

    - steps and checkpoints past the checkpoint's own step, newer policy versions and evaluations of them;
    - rollouts with a token that a newer version sampled;
    - training groups that were not used up by then, and groups of evaluations that did not end.

    `keep_groups` are the unfinished groups that the checkpoint names: they go back to `open`, their rollouts become
    untrained again, and those unfinished wait for a new attempt. Every other unfinished rollout is cancelled. Returns
    how many rows of each table were rolled back.
    """
    step = _step_of(db, after_version)
    newest = {"version": after_version, "step": step}
    counts = {}
    for table, where in (
        ("steps", "version > :version OR step > :step"),
        ("policy_versions", "version > :version"),
        ("checkpoints", "version > :version OR step > :step"),
        ("evaluations", "version > :version OR step > :step"),
    ):
        sql = f"UPDATE {table} SET state = 'rolled_back' WHERE state != 'rolled_back' AND ({where})"
        counts[table] = db.execute(sql, newest).rowcount
    db.execute("UPDATE evaluations SET state = 'abandoned' WHERE state = 'running'")
    db.execute("UPDATE checkpoints SET best = 0 WHERE state = 'rolled_back'")
    db.execute("UPDATE samples SET rolled_back = 1 WHERE step > ?", (step,))

    db.execute("CREATE TEMP TABLE IF NOT EXISTS kept (id TEXT PRIMARY KEY)")
    db.execute("DELETE FROM kept")
    db.executemany("INSERT OR IGNORE INTO kept VALUES (?)", [(group_id,) for group_id in keep_groups])
    # Whatever the lost steps said about a rollout no longer holds.
    db.execute("UPDATE rollouts SET step = NULL, fate = '' WHERE step > ? AND fate != 'rolled_back'", (step,))
    sql = """UPDATE rollouts SET fate = 'rolled_back' WHERE fate != 'rolled_back'
             AND (id IN (SELECT rollout_id FROM calls WHERE version_max > :version)
                  OR json_extract(pruned, '$.policy_version_max') > :version)"""
    counts["rollouts"] = db.execute(sql, newest).rowcount
    db.execute(
        """UPDATE groups SET state = 'open', step = NULL, finished_at = NULL
           WHERE id IN (SELECT id FROM kept) AND state != 'dropped'"""
    )
    sql = """UPDATE groups SET state = 'rolled_back' WHERE id NOT IN (SELECT id FROM kept) AND state != 'rolled_back'
             AND (created_version > :version OR step > :step
                  OR (state IN ('open', 'complete')
                      AND (eval_id IS NULL OR eval_id NOT IN (SELECT id FROM evaluations WHERE state = 'done'))))"""
    counts["groups"] = db.execute(sql, newest).rowcount
    _cancel_unfinished(db)
    db.execute("DROP TABLE kept")
    return counts


def _step_of(db: sqlite3.Connection, version: int) -> int:
    """The step after which the checkpoint of `version` was written: skipped steps move on without a new version."""
    sql = """SELECT coalesce((SELECT max(step) FROM checkpoints WHERE version = :v AND state != 'rolled_back'),
                             (SELECT max(step) FROM steps WHERE version <= :v AND state = 'applied'), 0)"""
    return db.execute(sql, {"v": version}).fetchone()[0]


def _cancel_unfinished(db: sqlite3.Connection) -> None:
    now = time.time()
    cause = "stopped: the run went back to a checkpoint"
    sql = f"""SELECT id, attempt FROM rollouts
              WHERE state IN {UNFINISHED} AND (group_id IS NULL OR group_id NOT IN (SELECT id FROM kept))"""
    for row in db.execute(sql).fetchall():
        db.execute(
            "UPDATE rollouts SET state = 'cancelled', cause = ?, finished_at = ? WHERE id = ?", (cause, now, row["id"])
        )
        insert(
            db,
            "rollout_states",
            {"rollout_id": row["id"], "attempt": row["attempt"], "state": "cancelled", "cause": cause, "at": now},
        )
