"""What a run has done so far, read from its store: the part of the status that outlives the supervisor."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from aglite.store import Store
from aglite.units import QUEUE

LOG_EVENTS = 50
PHASES = 200
PHASES_S = 900.0
"""How far back the phases go, in seconds."""


def history(store: Store) -> dict[str, Any]:
    """The keys `queue`, `causes`, `reward`, `val`, `entropy`, `kl`, `forks`, `checkpoint`, `best`, `phases` and `log`
    of the status; steps and evaluations that were rolled back are left out."""
    counts = store.counts_by_state()
    steps = live_steps(store)
    evaluations = [row for row in store.evaluations() if row["state"] == "done"]
    checkpoints = [row for row in store.checkpoints() if row["state"] == "kept"]
    latest = checkpoints[-1] if checkpoints else None
    best = next((row for row in checkpoints if row["best"]), None)
    scores = {row["step"]: row["result"]["mean"] for row in evaluations}
    return {
        "queue": {state: counts.get(state, 0) for state in QUEUE},
        "causes": store.counts_by_cause(),
        "reward": [
            {"step": row["step"], "mean": row["metrics"]["reward_mean"], "std": row["metrics"]["reward_std"]}
            for row in steps
        ],
        "val": [
            {"step": row["step"], **{key: row["result"][key] for key in ("mean", "stderr", "n")}} for row in evaluations
        ],
        "entropy": _series(steps, "entropy"),
        "kl": _series(steps, "kl_rollout"),
        "forks": [{"step": row["step"], **row["metrics"]["forks"]} for row in steps if "forks" in row["metrics"]],
        "checkpoint": {"step": latest["step"], "at": latest["created_at"]} if latest else None,
        "best": {"step": best["step"], "mean": scores.get(best["step"]), "path": best["path"]} if best else None,
        "phases": _recent_phases(store),
        "log": store.events(after=max(0, store.last_event_id() - LOG_EVENTS), limit=LOG_EVENTS),
    }


def _recent_phases(store: Store) -> list[dict[str, Any]]:
    """The phases of the last minutes of the run, in order; the one in force has no end."""
    rows = store.phases(limit=PHASES)
    last = rows[-1]["finished_at"] or time.time() if rows else 0.0
    keys = ("phase", "started_at", "finished_at")
    return [{key: row[key] for key in keys} for row in rows if (row["finished_at"] or last) > last - PHASES_S]


def database_bytes(db: Path) -> int:
    """Size of a run's database with its write-ahead log; 0 when it is gone."""
    size = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            size += db.with_name(f"{db.name}{suffix}").stat().st_size
    return size


def live_steps(store: Store) -> list[dict[str, Any]]:
    """The steps that hold."""
    return [row for row in store.steps() if row["state"] != "rolled_back"]


def _series(steps: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """A metric by step, where it was measured and is a number."""
    points = [{"step": row["step"], "value": row["metrics"].get(key)} for row in steps]
    return [point for point in points if point["value"] is not None and math.isfinite(point["value"])]
