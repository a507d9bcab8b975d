"""One picture of a run, as `GET /api/status` gives it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil

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
        "engine": engine,
        "training": runtime.progress,
        "gpu": gpus(),
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


_nvml: Any = None


def gpus() -> list[dict[str, Any]]:
    """Every NVIDIA GPU's load, memory (bytes), power (W) and temperature (C); [] where there is no driver."""
    global _nvml
    if _nvml is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:  # no driver, no GPU: nothing to show, and nothing wrong
            _nvml = False
    if not _nvml:
        return []
    found = []
    for index in range(_nvml.nvmlDeviceGetCount()):
        handle = _nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _nvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "name": _nvml.nvmlDeviceGetName(handle),
                "util": _nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "mem_used": memory.used,
                "mem_total": memory.total,
                "power_w": _nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "temp_c": _nvml.nvmlDeviceGetTemperature(handle, _nvml.NVML_TEMPERATURE_GPU),
            }
        )
    return found
