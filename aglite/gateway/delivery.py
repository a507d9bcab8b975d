"""Marks on calls whose reply reached its agent, written to the store in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from aglite.errors import AgliteError
from aglite.store import Store

log = logging.getLogger("aglite.gateway")

GATHER_S = 0.25
"""How long marks gather: a commit for each call's would double the commits of a lone agent."""


class Deliveries:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[int] = []
        self._flusher: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()

    def note(self, call_ids: Iterable[int]) -> None:
        """These replies reached their agent. Written soon after."""
        self._waiting.extend(call_ids)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            try:
                await self.flush()
            except AgliteError as error:  # they stay noted; whoever closes the session tries again and hears of it
                log.warning("calls could not be marked delivered: %s", error)
                return

    async def flush(self) -> None:
        """Write all marks that are waiting. Raises AgliteError if the store cannot; they go on waiting then."""
        async with self._flushing:  # what another one is writing is written when this returns
            ids, self._waiting = self._waiting, []
            if not ids:
                return
            try:
                await self._store.mark_delivered(ids)
            except AgliteError:
                self._waiting += ids
                raise

    async def stop(self) -> None:
        """Write what is waiting and wait for no more."""
        await self.flush()
        if self._flusher is not None:
            self._flusher.cancel()
