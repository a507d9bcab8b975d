"""Concurrency slots, handed out in the order of submission."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any


class Slots:
    """`size` slots. Whoever has waited longest by its `order` is next, so that what is tried again keeps its place."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._closed = False

    async def take(self, order: int, stop: asyncio.Future[Any]) -> bool:
        """Wait for a slot; False, with no slot, if `stop` is done first. `order` is unique among those waiting."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, turn))
        self._hand_out()
        await asyncio.wait({turn, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            return True
        if turn.done():
            self.give()
        turn.cancel()
        return False

    def give(self) -> None:
        self._free += 1
        self._hand_out()

    def pause(self) -> None:
        """Hand out nothing until `resume`."""
        self._closed = True

    def resume(self) -> None:
        self._closed = False
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._waiting and not self._closed:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
