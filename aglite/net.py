"""Listening sockets and the servers on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import socket
import ssl
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aglite.errors import AgliteError, RecipeError


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


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: each connection is one, and many systems begin with
    1,024. Agent programs get a limit of their own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def collect_rarely() -> None:
    """Let Python's collector of cyclic garbage run less often: for a process that holds much and makes few cycles.

    With the defaults it walks over everything that is alive every few hundred requests: a tenth of a gateway's time.
    What is loaded by now is taken out of its sight for good.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def address(sock: socket.socket, scheme: str = "http") -> str:
    """`scheme://host:port` of a listening socket; of one that listens on all addresses the one on loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM form with which a server speaks https."""

    cert: Path
    key: Path

    def check(self, setting: str) -> None:
        """Raise RecipeError, with the setting that names them, if they are no certificate and its private key."""
        for name, file in (("cert", self.cert), ("key", self.key)):
            if not file.is_file():
                raise RecipeError(f"{setting}.{name}: there is no file {file}", "correct the path")
        mend = "give a certificate and its own private key, both in PEM form and the key without a password"
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.cert, self.key, password=_no_password
            )
        except (OSError, ValueError) as error:  # of ssl, too
            raise RecipeError(f"{setting}: {self.cert} and {self.key} cannot be used: {error}", mend) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


MOST_CONNECTIONS = 256
"""At once, on the socket of one agent."""


HEAD_BYTES = 512 * 1024
"""Of a request, besides its body."""


class _Cut(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort()  # type: ignore[attr-defined]


class _Protocol(HttpToolsProtocol):
    """HTTP of which no part is kept that has no end: heads, trailers and sizes of chunks are otherwise collected for as
    long as they go on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._collected = 0

    def data_received(self, data: bytes) -> None:
        self._collected += len(data)
        super().data_received(data)
        if self._collected > HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._collected = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._collected = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._collected = 0
        super().on_message_complete()


class Listener:
    """An ASGI app served on a socket inside the running event loop."""

    def __init__(self, app: Any, sock: socket.socket, certificate: Certificate | None = None) -> None:
        self.url = address(sock, "https" if certificate else "http")
        self._sock = sock
        self._server = _Server(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                proxy_headers=False,  # nobody's word is taken for who a client is
                server_header=False,
                lifespan="off",
                http=_Protocol,
                ws="none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
                backlog=2048,
                ssl_certfile=certificate and certificate.cert,
                ssl_keyfile=certificate and certificate.key,
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

    async def also(self, sock: socket.socket) -> asyncio.Server:
        """Serve the same app on a further listening socket, without encryption; closing the server closes it.

        At most MOST_CONNECTIONS at once, further ones are cut: whoever is behind that socket shall not use up the files
        and the memory that all others need too."""
        server, config = self._server, self._server.config
        open_now: weakref.WeakSet[asyncio.Protocol] = weakref.WeakSet()

        class Counted(_Protocol):
            def connection_lost(self, error: Exception | None) -> None:
                open_now.discard(self)
                super().connection_lost(error)

        def protocol() -> asyncio.Protocol:
            if len(open_now) >= MOST_CONNECTIONS:
                return _Cut()
            made = Counted(config=config, server_state=server.server_state, app_state=server.lifespan.state)
            open_now.add(made)  # not when it is connected: many are accepted at once
            return made

        return await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=config.backlog)

    async def stop(self) -> None:
        if self._task is None:
            self._sock.close()
            return
        self._server.should_exit = True
        await self._task
