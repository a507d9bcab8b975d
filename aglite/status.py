"""One picture of a run, as `GET /api/status` gives it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil

from aglite.gpus import gpus
from aglite.history import database_bytes, history

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor


def status(supervisor: Supervisor) -> dict[str, Any]:
    """The run as it is now; see the control API in the docs for the keys."""
    recipe, store, run_dir, loop = supervisor.recipe, supervisor.store, supervisor.run_dir, supervisor.loop
    runtime, phases = supervisor.runtime, supervisor.phases
    gateway = getattr(runtime, "gateway", None)
    engine: dict[str, Any] = {"kind": recipe.engine.kind, "running": 0, "waiting": 0, "tokens_per_s": 0.0}
    engine |= {name: getattr(runtime.stats, name) for name in runtime.stats.__slots__}
    if phases.current not in ("rollout", "evaluating"):
        engine["tokens_per_s"] = 0.0
    return {
        "run": recipe.name,
        "recipe": recipe.name,
        "model": recipe.model,
        "dir": str(run_dir.path),
        "pid": os.getpid(),
        "mode": recipe.algorithm.mode,
        "started_at": supervisor.started_at,
        "now": time.time(),
        "phase": phases.current,
        "phase_since": phases.since,
        "message": supervisor.message(),
        "policy_version": loop.state.version if loop else 0,
        "step": loop.state.step if loop else 0,
        "steps": recipe.trainer.steps if supervisor.trains else 0,
        "eta_s": loop.eta_s() if loop else None,
        "last_update_s": phases.last_update_s,
        "max_hold_s": recipe.gateway.max_hold_s,
        "gate": {
            "state": "closed" if gateway is not None and gateway.gate.closed else "open",
            "held": gateway.gate.held if gateway is not None else 0,
        },
        "groups": {"open": len(loop.groups.open), "complete": len(loop.groups.complete)} if loop else {},
        "concurrency": runtime.launcher.concurrency if runtime.launcher else None,
        "quarantined": sorted(loop.order.quarantined) if loop else [],
        "engine": engine,
        "training": runtime.progress,
        "evaluation": {"done": loop.evaluation.done, "of": loop.evaluation.of} if loop and loop.evaluation else {},
        "gpu": gpus(_owners(runtime)),
        "host": host(run_dir.path, run_dir.db),
        **history(store),
    }


def host(folder: Any, db: Any) -> dict[str, Any]:
    """CPU, memory (bytes), free disk (bytes) and the database's size with its write-ahead log (bytes)."""
    memory = psutil.virtual_memory()
    return {
        "cpu_percent": psutil.cpu_percent(None),
        "cpus": psutil.cpu_count(),
        "ram_used": memory.total - memory.available,
        "ram_total": memory.total,
        "disk_free": psutil.disk_usage(str(folder)).free,
        "db_bytes": database_bytes(db),
    }


def _owners(runtime: Any) -> dict[int, str]:
    """What of the run's processes may hold memory of a GPU, by process id."""
    return runtime.worker.holders if runtime.worker_started.is_set() else {}
