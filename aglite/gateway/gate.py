"""The gate between agents and the engine: closed during an update, it holds requests instead of refusing them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator


class HeldTooLong(Exception):
    """A request was held past the limit. `retry_after_s` is a guess at when the gate is open again."""

    retry_after_s = 10


class Gate:
    """First held, first let through. A held request costs a future, no thread and no task of its own."""

    def __init__(self, max_hold_s: float) -> None:
        self.max_hold_s = max_hold_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed_since: float | None = None
        self._closed_before = 0.0
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def closed(self) -> bool:
        return self._closed_since is not None

    @property
    def held(self) -> int:
        """Requests that wait for the gate to open."""
        return sum(not future.done() for future in self._waiting)

    @property
    def inside(self) -> int:
        """Requests let through and not finished: generations in flight."""
        return self._inside

    def closed_s(self) -> float:
        """Seconds that the gate has been closed since it was made. Differences of it are times held."""
        since = self._closed_since
        return self._closed_before + (time.monotonic() - since if since is not None else 0.0)

    def close(self) -> None:
        """Hold what arrives from now on. What is inside goes on until the engine pre-empts it."""
        if self._closed_since is None:
            self._closed_since = time.monotonic()

    def open(self) -> None:
        """Let everything through that waits, in the order of arrival."""
        if self._closed_since is None:
            return
        self._closed_before = self.closed_s()
        self._closed_since = None
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                self._enter()  # counted now: a drain that begins before the request wakes must wait for it
                future.set_result(None)

    @contextlib.asynccontextmanager
    async def through(self) -> AsyncIterator[None]:
        """Wait for the gate, then count as inside. Raises HeldTooLong after `max_hold_s`."""
        if self._closed_since is None:
            self._enter()
        else:
            await self._wait()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is inside; False if that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _enter(self) -> None:
        self._inside += 1
        self._idle.clear()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        timer = loop.call_later(self.max_hold_s, _expire, future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._inside -= 1  # let through and cancelled in the same moment
                if self._inside == 0:
                    self._idle.set()
            raise
        finally:
            timer.cancel()
            if future in self._waiting:
                self._waiting.remove(future)


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(HeldTooLong())
