"""A sidecar: a container of ours that owns an agent's network namespace and its scratch files.

An agent's container joins the sidecar's network and mounts its scratch volume; both are used again by later rollouts,
the files wiped in between. What runs in a sidecar is `sidecar_child.py`.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, NamedTuple, Protocol

from aglite.rollouts.backends.contained import MOST_FILES
from aglite.rollouts.backends.engine import Engine
from aglite.rollouts.causes import BackendError, Cause

ANSWER_TIMEOUT_S = 120.0


class Served(Protocol):
    """A socket that the gateway answers on."""

    def close(self) -> None: ...


class Left(NamedTuple):
    """What a sidecar tells besides the files that it gives."""

    too_much: int
    """Files and folders beyond the limits."""
    special: int
    """Pipes, sockets, and what cannot be read."""
    unroutable: int
    """How often since the `fill` somebody in its network tried to reach what there is no way to."""


class Sidecar:
    """One sidecar, as long as its container lives."""

    def __init__(
        self,
        engine: Engine,
        container: str,
        volume: str,
        served: Served,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        vsock: bool,
    ) -> None:
        """`vsock`: whether the engine's own seccomp profile lets containers have sockets to the hypervisor."""
        self.vsock = vsock
        self.container = container
        self.volume = volume
        self._engine = engine
        self._served = served
        self._reader = reader
        self._writer = writer

    @property
    def alive(self) -> bool:
        """Its program holds a connection to us, which ends with it."""
        return not self._reader.at_eof() and not self._engine.ended(self.container).done()

    async def fill(self, archive: IO[bytes], size: int) -> None:
        """Wipe the scratch files, and unpack a tar of `size` bytes there. Raises BackendError."""
        await self._order(f"fill {size}\n".encode(), archive)

    async def wipe(self) -> None:
        await self._order(b"wipe\n")

    async def take(self, most_bytes: int) -> tuple[IO[bytes], Left]:
        """A tar of the working directory, and what is not in it. Raises BackendError."""
        file = tempfile.SpooledTemporaryFile(max_size=1 << 20)  # noqa: SIM115 - it is handed on
        try:
            async with _answering():
                self._writer.write(f"take {most_bytes} {MOST_FILES}\n".encode())
                # headers and padding, besides what the files hold
                room = most_bytes + 4096 * (MOST_FILES + 1)
                while size := int.from_bytes(await self._reader.readexactly(4), "big"):
                    room -= size
                    if room < 0:
                        raise BackendError(Cause("lost", "its files are more than its sidecar may send"))
                    file.write(await self._reader.readexactly(size))
                left = Left(*map(int, (await self._reader.readline()).removeprefix(b"left ").split()))
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return file, left

    async def discard(self) -> None:
        """End and delete it, with its volume. Raises BackendError if the engine cannot."""
        self._served.close()
        self._writer.close()
        await self._engine.remove(self.container)

    async def _order(self, line: bytes, archive: IO[bytes] | None = None) -> None:
        async with _answering():
            self._writer.write(line)
            while archive and (data := archive.read(1 << 18)):
                self._writer.write(data)
                await self._writer.drain()
            answer = (await self._reader.readline()).decode("utf-8", "replace").strip()
        if answer != "ok":
            raise BackendError(Cause("launch", f"scratch files: {answer or 'the sidecar is gone'}"))


class _answering:
    """A sidecar that breaks off or does not answer has failed."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(ANSWER_TIMEOUT_S)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind, error, traceback) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise BackendError(Cause("lost", f"its sidecar has not answered for {ANSWER_TIMEOUT_S:.0f} s")) from None
        if isinstance(error, OSError | EOFError | ValueError):
            raise BackendError(Cause("lost", f"its sidecar is gone: {error}")) from None
