"""Listening sockets and the servers on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from aglite.errors import AgliteError


def bind(host: str, port: int, what: str, setting: str) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. `what` and `setting` word the error if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AgliteError(
                f"{what}: port {port} on {host} is taken by another program",
                f"stop it, or choose another port with --set {setting}=0 (0 takes a free one)",
            ) from None
        raise AgliteError(
            f"{what}: cannot listen on {host} port {port}: {error.strerror}",
            f"change {setting}, or the address (gateway.host)",
        ) from None
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """An ASGI app served on a socket inside the running event loop."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        self.url = address(sock)
        self._sock = sock
        self._server = _Server(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                lifespan="off",
                http="httptools",
                ws="none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
                backlog=2048,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise AgliteError(f"the server on {self.url} ended at once", "see the supervisor's log")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        if self._task is None:
            self._sock.close()
            return
        self._server.should_exit = True
        await self._task
