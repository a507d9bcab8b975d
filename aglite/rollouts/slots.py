"""Concurrency slots, handed out in the order of submission."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any


class Slots:
    """`size` slots. Whoever has waited longest by its `order` is next, so that what is tried again keeps its place."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._waiting: list[tuple[int, asyncio.Future[None], asyncio.Future[Any]]] = []
        self._closed = False
        self._let_in: int | None = None

    async def take(self, order: int, stop: asyncio.Future[Any]) -> bool:
        """Wait for a slot; False, with no slot, if `stop` is done first. `order` is unique among those waiting."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, turn, stop))
        self._hand_out()
        await asyncio.wait({turn, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            return True
        if turn.done():  # both at once
            if self._let_in is not None:
                self._let_in += 1
            self.give()
        turn.cancel()
        return False

    def give(self) -> None:
        self._free += 1
        self._hand_out()

    def resize(self, size: int) -> None:
        """Have `size` slots. When that is fewer, those that are out stay so until they are given back."""
        self._free += size - self.size
        self.size = size
        self._hand_out()

    def pause(self) -> None:
        """Hand out nothing until `resume`."""
        self._closed = True

    def resume(self) -> None:
        self._closed = False
        self._hand_out()

    def only(self, number: int | None) -> None:
        """Hand out only `number` more slots; None: as many as there are. Independent of `pause`."""
        self._let_in = number
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free > 0 and self._waiting and not self._closed and self._let_in != 0:
            _, turn, stop = heapq.heappop(self._waiting)
            if not (turn.done() or stop.done()):
                turn.set_result(None)
                self._free -= 1
                if self._let_in is not None:
                    self._let_in -= 1
