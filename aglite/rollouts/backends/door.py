"""The run's door: the socket that sidecars report on, each with the socket that it listens on in its network."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("aglite.rollouts")


class Arrival(NamedTuple):
    """A sidecar that has reported."""

    connection: socket.socket
    listening: socket.socket
    vsock: bool
    """Whether the engine lets containers have sockets to the hypervisor."""

    def close(self) -> None:
        self.connection.close()
        self.listening.close()


class Door:
    def __init__(self, path: Path) -> None:
        """`path`: where to put the socket; the place must be the run's own."""
        self.path = path
        self._expected: dict[str, asyncio.Future[Arrival]] = {}
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        self.path.unlink(missing_ok=True)
        self._socket = _listen(self.path)
        self._accepting = asyncio.create_task(self._accept(self._socket))

    def close(self) -> None:
        if self._accepting is not None and self._socket is not None:
            self._accepting.cancel()
            self._socket.close()
            self.path.unlink(missing_ok=True)
            self._socket = None

    def expect(self, name: str) -> asyncio.Future[Arrival]:
        """Done when the sidecar of that name has reported. Others are turned away."""
        arrival = self._expected[name] = asyncio.get_running_loop().create_future()
        return arrival

    def forget(self, name: str) -> None:
        del self._expected[name]

    async def _accept(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(door)
            except OSError as error:  # too many open files
                log.warning("a sidecar cannot report: %s", error)
                await asyncio.sleep(0.2)
                continue
            try:
                name, arrived = await asyncio.to_thread(_hello, connection)
            except OSError as error:
                log.warning("a sidecar's report could not be read: %s", error)
                connection.close()
                continue
            arrival = self._expected.get(name)
            if arrival is None or arrival.done():
                arrived.close()
            else:
                arrival.set_result(arrived)


def _listen(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    # The path of a socket may have 107 bytes; through a descriptor of its folder it is short.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    # A sidecar has another user's number; the run's folder keeps others of this machine out.
    os.chmod(path, 0o666)
    door.listen(256)
    door.setblocking(False)
    return door


def _hello(connection: socket.socket) -> tuple[str, Arrival]:
    """What a sidecar that has just connected says: its name, and the rest."""
    connection.settimeout(10)
    hello, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
    if len(descriptors) != 1:
        raise OSError("it passed no socket")
    connection.setblocking(False)
    listening = socket.socket(fileno=descriptors[0])
    listening.setblocking(False)
    name, _, vsock = hello.decode("ascii", "replace").partition(" ")
    return name, Arrival(connection, listening, bool(vsock))
