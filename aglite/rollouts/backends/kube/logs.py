"""What a container prints, followed through the API server from its first byte to its last, whatever breaks between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

from aglite.rollouts.backends.contained import Said
from aglite.rollouts.backends.kube.api import FIRST_WAIT_S, LONGEST_WAIT_S, Api, ApiError, NoAnswer
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.process import FLOOD_PAUSE_S

log = logging.getLogger("aglite.rollouts")

LONGEST_STAMP = 40
"""Bytes that are waited for at the beginning of a line before it is taken for one without a time."""


class Stamped:
    """Takes the times off the lines of a log, and leaves out what had come before it was read anew.

    Each line comes as `2026-01-31T12:00:00.123456789Z TEXT`. A line may come in pieces.
    """

    def __init__(self) -> None:
        self.last = ""
        """The time of the newest line that has begun."""
        self._start = b""
        self._in_line = False
        self._given = 0
        """Bytes of the newest line that were given out."""
        self._skip = 0
        self._again = False

    def take(self, data: bytes) -> bytes:
        """What is new in the next bytes, without times."""
        out = bytearray()
        while data:
            if not self._in_line:
                self._start += data
                stamp, space, rest = self._start.partition(b" ")
                if not space and len(self._start) < LONGEST_STAMP:
                    return bytes(out)
                data, self._start, self._in_line = rest if space else stamp, b"", True
                self._begin(stamp.decode("ascii", "replace") if space else self.last)
            text, end, data = data.partition(b"\n")
            piece = text + end
            new = piece[self._skip :]
            self._skip = max(0, self._skip - len(piece))
            self._given += len(new)
            out += new
            self._in_line = not end
        return bytes(out)

    def _begin(self, time: str) -> None:
        if self._again and time < self.last:
            self._skip = sys.maxsize
        elif self._again and time == self.last:
            self._skip, self._again = self._given, False
        else:
            self.last, self._skip, self._given, self._again = time, 0, 0, False

    def read_anew(self) -> None:
        """What comes next is the log from the line of `last` on, or from earlier."""
        self._start, self._in_line, self._skip, self._again = b"", False, 0, bool(self.last)


class Follower:
    """Writes a container's output into a log until its end. One that floods a full log is read slowly."""

    def __init__(self, api: Api, pod: str, container: str, log: LogFile) -> None:
        self.log = log
        self.said = Said()
        """Of both streams together: a pod's log is one."""
        self._api = api
        self._path = f"/api/v1/namespaces/{api.namespace}/pods/{pod}/log"
        self._container = container
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def finish(self, timeout_s: float) -> None:
        """The container has ended: wait for the rest of its output, at most so long, and close the log."""
        self._over.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        self.close()

    def close(self) -> None:
        self._task.cancel()
        self.log.close()

    async def _follow(self) -> None:
        stamped = Stamped()
        wait_s = FIRST_WAIT_S
        while True:
            query = [("container", self._container), ("follow", "true"), ("timestamps", "true")]
            if stamped.last:
                query.append(("sinceTime", stamped.last))
            stamped.read_anew()
            was_over = self._over.is_set()
            try:
                async with self._api.stream(self._path, query) as chunks:
                    async for chunk in chunks:
                        self._write(stamped.take(chunk))
                        wait_s = FIRST_WAIT_S
                        if self.log.full:
                            await asyncio.sleep(FLOOD_PAUSE_S)
                if was_over:
                    return  # all of it has been read since the end
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), wait_s)
            except (ApiError, NoAnswer) as error:
                log.debug("the log of %s: %s", self._path, error)
                if was_over and isinstance(error, ApiError) and error.status == 404:
                    return  # it is gone with its pod
                await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _write(self, data: bytes) -> None:
        self.said.add(data)
        self.log.write(data)
