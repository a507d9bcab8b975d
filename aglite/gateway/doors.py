"""Where agents reach the gateway: on loopback, unless the recipe opens it to other machines."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from aglite.config import GatewaySettings
from aglite.net import Certificate, Listener, bind


class Doors:
    """The listening sockets of the model routes: one at `gateway.host`, with https where the recipe has a certificate.
    Agents that aglite starts itself then get a second one, plain and on loopback, and need not know the certificate."""

    def __init__(self, settings: GatewaySettings, folder: Path, *, own_agents: bool, port: int | None = None) -> None:
        """Take the ports; `port` in place of the recipe's.

        Raises RecipeError for an unusable certificate, AgliteError for a port that is taken.
        """
        self._public_url = settings.public_url
        self._certificate: Certificate | None = None
        if settings.tls is not None:
            self._certificate = Certificate(folder / settings.tls.cert, folder / settings.tls.key)
            self._certificate.check("gateway.tls")
        port = settings.port if port is None else port
        self._main = bind(settings.host, port, "the gateway", "gateway.port")
        self.port: int = self._main.getsockname()[1]
        self._inner = bind("127.0.0.1", 0, "the gateway", "gateway.port") if self._certificate and own_agents else None
        self._listeners: list[Listener] = []

    async def open(self, app: Any) -> None:
        """Serve `app` from now on."""
        self._listeners.append(Listener(app, self._main, self._certificate))
        if self._inner is not None:
            self._listeners.append(Listener(app, self._inner))
        for listener in self._listeners:
            await listener.start()

    async def serve(self, sock: socket.socket) -> asyncio.Server:
        """Let the model routes answer on a further listening socket, plainly; closing what is returned ends it."""
        return await self._listeners[-1].also(sock)

    async def stop(self) -> None:
        for listener in self._listeners:
            await listener.stop()

    def close(self) -> None:
        """Give the ports back if they were never opened."""
        if not self._listeners:
            for sock in (self._main, self._inner):
                if sock is not None:
                    sock.close()

    @property
    def url(self) -> str:
        """For agents on this machine."""
        return self._listeners[-1].url

    @property
    def public_url(self) -> str:
        """For agents that somebody else launches, wherever they are."""
        return self._public_url or self._listeners[0].url
