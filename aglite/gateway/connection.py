"""One HTTP response on its way to a client, over ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

_READ_ON = 64 * 1024 * 1024
"""Bytes of a body that are read past its limit and thrown away."""

_LINGER_S = 2.0
"""How long a client may go on sending after it was refused."""

_JSON: Header = (b"content-type", b"application/json")
_SSE: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Connection:
    """`started`: a byte of the response was written. `gone`: the client closed before the response was complete."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.started = False
        self.complete = False
        self.gone = False
        self.wrote_at = 0.0
        self._receive = receive
        self._send = send
        self._lock = asyncio.Lock()  # keep-alives come from another task

    async def read_body(self, limit: int) -> bytes | None:
        """The request body; None when it is longer than `limit` bytes. Raises ConnectionResetError if it breaks off.

        A body that is too long is read on for a while: a client that is still sending would not see the answer.
        """
        whole, size = bytearray(), 0  # joined as it comes: a body may arrive in very many pieces
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ConnectionResetError
            part, more = message.get("body", b""), message.get("more_body", False)
            if not more and size == 0 and len(part) <= limit:
                return part
            size += len(part)
            if size <= limit:
                whole += part
            elif size > limit + _READ_ON or not more:
                return None
            else:
                whole.clear()
                continue
            if not more:
                return bytes(whole)

    async def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` if the client closes before the response is complete."""
        while not self.complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self.complete:
                    self.gone = True
                    on_gone()
                return

    async def respond(self, status: int, body: bytes, headers: list[Header] | None = None) -> None:
        """A whole JSON response."""
        self.started = True
        head = [_JSON, (b"content-length", str(len(body)).encode()), *(headers or ())]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        self.complete = not self.gone
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, status: int, body: bytes, headers: list[Header]) -> None:
        """A whole JSON response to a request that is still being sent. The connection is closed, but not at once: a
        client that sends into a closed one sees that instead of the response."""
        self.started = self.complete = True
        head = [_JSON, (b"content-length", str(len(body)).encode()), (b"connection", b"close"), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass
        await self._send({"type": "http.response.body", "body": b""})

    async def write(self, data: bytes) -> None:
        """Some events of a stream; the first write opens it."""
        async with self._lock:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _SSE})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self.wrote_at = time.monotonic()

    async def finish(self, data: bytes) -> None:
        """The last events of a stream."""
        async with self._lock:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _SSE})
            self.complete = not self.gone
            await self._send({"type": "http.response.body", "body": data})

    def silent(self, silent_s: float) -> bool:
        """Whether the stream is open and nothing has been written to it for so long, nor is just being written."""
        if self._lock.locked() or not self.started or self.complete or self.gone:
            return False
        return time.monotonic() - self.wrote_at >= silent_s

    async def keep_alive(self, make: Callable[[], bytes]) -> None:
        """Write what `make` returns, unless the stream has ended by then."""
        async with self._lock:
            if not self.complete and not self.gone:
                await self._send({"type": "http.response.body", "body": make(), "more_body": True})
                self.wrote_at = time.monotonic()
