"""The log of one attempt: the head and the tail of what was printed, however much that is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from aglite.redact import Redactor

log = logging.getLogger("aglite.rollouts")

TAIL_BYTES = 1 << 20
"""Most of a log's tail that is held in memory until its end."""

LONGEST_LINE = 1 << 16
"""Bytes of a line that are waited for before it is masked."""


class LogFile:
    """Keeps at most `cap` bytes of output in a file: the head as it comes, the tail when it is closed.

    `header` is written before the first output; without output there is no header. With `append` the file goes on
    where it ended. With a `redactor` the output is masked line by line before it is kept. A disk that is full costs
    output, never the rollout.
    """

    def __init__(
        self, path: Path, cap: int, *, header: bytes = b"", append: bool = False, redactor: Redactor | None = None
    ) -> None:
        self.path = path
        self.written = 0
        """Bytes of output so far."""
        self.recent = b""
        """The last 2 KiB of output."""
        self._tail_room = min(cap // 4, TAIL_BYTES)
        self._head_room = cap - self._tail_room
        self._head_bytes = 0
        self._tail = bytearray()
        self._header = header
        self._redactor = redactor or Redactor(())
        self._waiting = bytearray()
        self._file: int | None = None
        self._open(os.O_APPEND if append else os.O_TRUNC)

    @property
    def left_out(self) -> int:
        """Bytes that are not in the file after `close`."""
        return max(0, self.written - self._head_bytes - min(self._tail_room, len(self._tail)))

    @property
    def full(self) -> bool:
        """The head is full, so further output is mostly thrown away."""
        return self._head_room == 0

    def write(self, data: bytes | memoryview) -> None:
        if not self._redactor:
            self._take(data)
            return
        self._waiting += data
        end = self._waiting.rfind(b"\n") + 1 or (len(self._waiting) if len(self._waiting) > LONGEST_LINE else 0)
        self._take(self._redactor.data(bytes(self._waiting[:end])))
        del self._waiting[:end]

    def _take(self, data: bytes | memoryview) -> None:
        if not data:
            return
        if self._header:
            self._put(self._header)
            self._header = b""
        self.written += len(data)
        self.recent = (self.recent + bytes(data[-2048:]))[-2048:]
        head = data[: self._head_room]
        if len(head):
            self._put(head)
            self._head_bytes += len(head)
            self._head_room -= len(head)
        if len(head) < len(data):
            self._tail += data[len(head) :]
            if len(self._tail) > 2 * self._tail_room:
                del self._tail[: len(self._tail) - self._tail_room]

    def close(self) -> None:
        if self._waiting:
            self._take(self._redactor.data(bytes(self._waiting)))
            self._waiting.clear()
        if self._file is None:
            return
        if self.left_out:
            self._put(f"\n[... {self.left_out:,} bytes left out ...]\n".encode())
        self._put(self._tail[max(0, len(self._tail) - self._tail_room) :])
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def last_line(self) -> str:
        """The last line that is not empty, at most 200 characters, fit for one line of a screen."""
        lines = [line.strip() for line in self.recent.decode("utf-8", "replace").splitlines()]
        line = next((line for line in reversed(lines) if line), "")
        return "".join(char if char.isprintable() else " " for char in line)[:200]

    def _open(self, how: int) -> None:
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
        except OSError as error:
            log.warning("no log at %s: %s", self.path, error)

    def _put(self, data: bytes | memoryview | bytearray) -> None:
        view = memoryview(data)
        try:
            while self._file is not None and view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            log.warning("the log %s ends early: %s", self.path, error)
            os.close(self._file)  # type: ignore[arg-type]
            self._file = None
