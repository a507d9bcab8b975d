"""What a container reads and writes, over the engine's stream: its input to it, its output into a log; on the event
loop, without a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from aglite.rollouts.backends.contained import Said
from aglite.rollouts.logfile import LONGEST_LINE, LogFile
from aglite.rollouts.process import FLOOD_PAUSE_S

READ_BYTES = 1 << 16
STDOUT = 1
HEADER_BYTES = 8
"""Of each frame: the stream in one byte, three of nothing, the length in four."""


class Output:
    """Reads an attached container's frames until their end. A container whose log is full is slowed down.

    Its standard output and error are two streams, whose lines are kept whole.
    """

    def __init__(self, attached: Any, log: LogFile) -> None:
        """`attached`: what the SDK's `attach_socket` gives."""
        self.log = log
        self.said = Said()
        """Of standard output."""
        self._loop = asyncio.get_running_loop()
        self._attached = attached  # it closes the socket when it is forgotten
        self._socket = attached._sock
        self._socket.setblocking(False)
        self._header = bytearray()
        self._left = 0
        self._lines: dict[int, bytearray] = {}
        """What has come of the line that a stream is in."""
        self._stream = STDOUT
        self._line = bytearray()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._sending: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def send(self, data: bytes) -> None:
        """Give the container its standard input, which ends with `data`; as fast as it reads it."""
        self._sending = self._loop.create_task(self._send(data))

    async def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or closed its input
            await self._loop.sock_sendall(self._socket, data)
            self._socket.shutdown(socket.SHUT_WR)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the end of the output, at most so long, and close the log."""
        await asyncio.wait({self._ended}, timeout=timeout_s)
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket.fileno())
        if not self._ended.done():
            self._ended.set_result(None)
        self._socket.close()
        self._attached.close()
        for line in self._lines.values():
            self.log.write(line)
        self.log.close()

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            if not self._ended.done():
                self._ended.set_result(None)
            return
        self._take(data)
        if self.log.full:
            self._loop.remove_reader(self._socket.fileno())
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _take(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            if self._left:
                part = view[: self._left]
                self._write(part)
                self._left -= len(part)
                view = view[len(part) :]
                continue
            head = view[: HEADER_BYTES - len(self._header)]
            self._header += head
            view = view[len(head) :]
            if len(self._header) == HEADER_BYTES:
                self._stream = self._header[0]
                self._line = self._lines.setdefault(self._stream, bytearray())
                self._left = int.from_bytes(self._header[4:], "big")
                self._header.clear()

    def _write(self, part: memoryview) -> None:
        if self._stream == STDOUT:
            self.said.add(part)
        line = self._line
        line += part
        end = len(line) if len(line) > LONGEST_LINE else line.rfind(b"\n") + 1
        if end:
            self.log.write(bytes(line[:end]))
            del line[:end]
