"""Pauses: because somebody asked for one, or because the disk is nearly full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil

from aglite.errors import AgliteError
from aglite.model_folder import size
from aglite.phases import PhaseMachine
from aglite.runtime import Runtime

DISK_POLL_S = 5.0
"""How often the free disk is looked at."""


class Pauses:
    """Says whether a run must be held, and holds it: no request is served and no rollout starts meanwhile."""

    def __init__(self, runtime: Runtime, phases: PhaseMachine, wake: asyncio.Event) -> None:
        """`wake` is set when somebody asks for something: a pause, its end, a stop."""
        self.asked = ""
        """Why somebody wants a pause; '' when nobody does."""
        self.held = ""
        """Why the run is held at the moment."""
        self._runtime = runtime
        self._phases = phases
        self._wake = wake

    def reason(self, need_mb: int = 0) -> str:
        """Why the run has to be held now, '' if it need not; `need_mb` is what is about to be written. Raises
        AgliteError when its directory is gone."""
        run_dir, floor = self._runtime.run_dir, self._runtime.recipe.trainer.min_free_disk_mb
        if not run_dir.db.exists():
            raise AgliteError(
                f"{run_dir.path} was deleted or moved while the run was going on",
                "if it was moved: `aglite up` with --dir goes on from its last checkpoint",
            )
        free, wanted = free_mb(run_dir.path), max(floor, need_mb)
        if free < wanted:
            return f"{free} MB of disk left, {wanted} wanted: free some, the run then goes on by itself"
        return self.asked

    async def hold(self, stopping: Callable[[], bool], version: int, need_mb: int = 0) -> None:
        """Hold everything until there is no reason left or `stopping`; generations then go on with `version`."""
        runtime, came_from = self._runtime, self._phases.current
        while not stopping() and (why := self.reason(need_mb)):
            self._wake.clear()  # before anything is waited for: whoever wants something meanwhile is heard
            if not self.held:
                runtime.gateway.gate.close()
                if runtime.launcher is not None:
                    runtime.launcher.pause()
                await runtime.worker.preempt()
            if why != self.asked and not self.held:
                await runtime.store.add_event("warning", "run", f"paused: {why}")
            self.held = why
            await self._phases.set("paused", why)
            await wait(self._wake, DISK_POLL_S)
        if not self.held:
            return
        self.held = ""
        await runtime.worker.resume(version)
        runtime.gateway.gate.open()
        if runtime.launcher is not None:
            runtime.launcher.resume()
        if not stopping():
            await self._phases.set(came_from, "resumed")


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def free_mb(folder: Path) -> int:
    """Free space on a folder's disk, in MB rounded down."""
    return psutil.disk_usage(str(folder)).free // 2**20


def folder_mb(folder: Path) -> int:
    """What a folder takes on disk, in MB rounded up; 0 when it is not there."""
    return -(-size(folder) // 2**20)
