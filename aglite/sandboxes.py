"""What of a run's agents lives at the moment, and what outlived its rollout."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import psutil

from aglite.paths import ROLLOUT_ID
from aglite.rollouts import reap_child

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

ROLLOUT = f"{ROLLOUT_ID}=".encode()


def sandboxes(supervisor: Supervisor) -> list[dict[str, Any]]:
    """Every attempt under way as the launcher has it, with `backend`, `age_s`, `leaked` (false), and where its
    processes are this machine's `processes`, `cpu_s` (CPU time in seconds) and `memory` (bytes, resident), else null.

    Then, one by one, the processes of this machine that belong to a rollout that is not running: `leaked` is true.
    Reads /proc, so call it in a thread.
    """
    launcher = supervisor.runtime.launcher
    if launcher is None:
        return []
    backend, now = supervisor.recipe.agent.backend, time.time()
    live = launcher.sandboxes()
    known = {row["rollout_id"] for row in live}
    rows = []
    found = _processes(supervisor.runtime.reaper.entry)
    for row in live:
        mine = found.get(row["rollout_id"]) if row["pid"] else None
        rows.append({**row, "backend": backend, "age_s": now - row["begun"], "leaked": False, **_load(mine)})
    for rollout_id, processes in found.items():
        if rollout_id not in known:
            rows += [_leaked(rollout_id, process, backend, now) for process in processes]
    return rows


async def end_leaked(supervisor: Supervisor, rollout_id: str) -> bool:
    """End the processes that a rollout left which is not running; False if there are none."""
    entries = supervisor.runtime.reaper.entry, ROLLOUT + os.fsencode(rollout_id)
    ended, surviving = await asyncio.to_thread(reap_child.end, lambda environ: reap_child.has(environ, *entries))
    return bool(ended or surviving)


def _processes(supervisor: bytes) -> dict[str, list[psutil.Process]]:
    """The processes of this supervisor's agents, by the rollout in their environment."""
    found: dict[str, list[psutil.Process]] = {}
    for pid in reap_child.find(lambda environ: reap_child.has(environ, supervisor)):
        environ = b"\0" + reap_child.environ_of(pid)
        at = environ.find(b"\0" + ROLLOUT)
        if at < 0:
            continue  # the model worker, or it has ended
        value = environ[at + 1 + len(ROLLOUT) : environ.find(b"\0", at + 1)]
        try:
            found.setdefault(os.fsdecode(value), []).append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _load(processes: list[psutil.Process] | None) -> dict[str, Any]:
    if not processes:
        return {"processes": None, "cpu_s": None, "memory": None}
    cpu = memory = 0.0
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                cpu += times.user + times.system
                memory += process.memory_info().rss
        except psutil.Error:  # it ended meanwhile
            continue
    return {"processes": len(processes), "cpu_s": cpu, "memory": int(memory)}


def _leaked(rollout_id: str, process: psutil.Process, backend: str | None, now: float) -> dict[str, Any]:
    try:
        begun = process.create_time()
    except psutil.Error:
        begun = now
    return {
        "rollout_id": rollout_id,
        "task_id": "",
        "split": "",
        "state": "leaked",
        "attempt": 0,
        "begun": begun,
        "pid": process.pid,
        "container": None,
        "workdir": None,
        "backend": backend,
        "age_s": now - begun,
        "leaked": True,
        **_load([process]),
    }
