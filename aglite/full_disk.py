"""A disk that is full all of a sudden: the run waits for room instead of ending."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from aglite.errors import StoreError

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor


class FullDisk:
    """While the store waits for room nothing can be recorded: agents are held and none is started. Slower ways of
    running out of disk never get here, see `training.pauses`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.full = False
        self._supervisor = supervisor
        self._since = 0.0
        self._closed_gate = False
        self._events: set[asyncio.Task[None]] = set()

    @property
    def what(self) -> str:
        return f"the disk of {self._supervisor.run_dir.path} is full; free some, the run then goes on by itself"

    def watch(self) -> None:
        """Be told by the store, in the running event loop."""
        loop = asyncio.get_running_loop()
        self._supervisor.store.wait_when_full(lambda full: loop.call_soon_threadsafe(self._changed, full))

    def _changed(self, full: bool) -> None:
        runtime, self.full = self._supervisor.runtime, full
        if full:
            self._since = time.time()
            self._supervisor.on_line(f"paused: {self.what}")
        if not runtime.ready:
            return
        if full:
            self._closed_gate = not runtime.gateway.gate.closed
            runtime.gateway.gate.close()
            if runtime.launcher is not None:
                runtime.launcher.pause()
            return
        loop = self._supervisor.loop
        if not (loop and loop.paused):
            if self._closed_gate:
                runtime.gateway.gate.open()
            if runtime.launcher is not None:
                runtime.launcher.resume()
        event = asyncio.create_task(self._note())
        self._events.add(event)
        event.add_done_callback(self._events.discard)

    async def _note(self) -> None:
        text = f"the disk was full for {time.time() - self._since:.0f} s; the run goes on"
        with contextlib.suppress(StoreError):  # it is full again, or the run has ended
            await self._supervisor.store.add_event("warning", "run", text)
