"""The pool of sidecars, one for each slot: made ahead, seen alive when they are handed out, used again."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from aglite.config import Agent
from aglite.rollouts.backends.contained import FOLDER, MOST_FILES
from aglite.rollouts.backends.door import Door
from aglite.rollouts.backends.engine import LABEL_ROLE, Engine
from aglite.rollouts.backends.sidecar import Served, Sidecar
from aglite.rollouts.backends.sidecar_image import REPOSITORY, sidecar_image
from aglite.rollouts.causes import BackendError, Cause

log = logging.getLogger("aglite.rollouts")

PORT = 8000
"""Where agents find the gateway on their loopback device."""

DOOR = "/door"
START_TIMEOUT_S = 60.0
MADE_AT_ONCE = max(2, os.cpu_count() or 1)
"""Of those made ahead: so that the first are ready soon, and not all of them late."""
OVERHEAD_MB = 64
"""Memory of a sidecar besides the files it writes."""

Serve = Callable[[socket.socket], Awaitable[Served]]
"""Let the gateway's model routes, and nothing else, answer on a listening socket."""


class Sidecars:
    """The pool: one for each slot is made ahead. A sidecar was seen alive when it is handed out."""

    def __init__(self, engine: Engine, agent: Agent, door: Path, serve: Serve) -> None:
        """`door`: where to put the socket that sidecars report on; the place must be the run's own."""
        self._engine = engine
        self._agent = agent
        self._door = Door(door)
        self._serve = serve
        self._idle: list[Sidecar] = []
        self._making: deque[asyncio.Task[Sidecar]] = deque()
        """Those that are made ahead, in the order in which they will be ready."""
        self._image = ""

    async def open(self) -> None:
        """Make the image if it is not there, and begin to make a sidecar for each slot."""
        tag, archive, settings = await asyncio.to_thread(sidecar_image)
        known = await self._engine.call("images", name=tag)
        if not known:
            changes = [f"ENV {entry.replace('=', ' ', 1)}" for entry in settings["Env"]]
            await self._engine.call(
                "import_image_from_data", archive, repository=REPOSITORY, tag=tag.partition(":")[2], changes=changes
            )
        self._image, self._entrypoint = tag, settings["Entrypoint"]
        self._door.open()
        turns = asyncio.Semaphore(MADE_AT_ONCE)
        self._making.extend(asyncio.create_task(self._make_in_turn(turns)) for _ in range(self._agent.concurrency))

    async def close(self) -> None:
        """End and delete the idle sidecars."""
        for making in self._making:
            making.cancel()
        made = await asyncio.gather(*self._making, return_exceptions=True)
        self._making.clear()
        self._idle += [sidecar for sidecar in made if isinstance(sidecar, Sidecar)]
        self._door.close()
        idle, self._idle = self._idle, []
        await asyncio.gather(*(sidecar.discard() for sidecar in idle))

    async def take(self) -> Sidecar:
        """An idle sidecar, the next one that is ready, or else a new one. Raises BackendError."""
        while self._idle or self._making:
            sidecar = self._idle.pop() if self._idle else await self._made_ahead()
            if sidecar is None:
                continue
            if sidecar.alive:
                return sidecar
            await sidecar.discard()
        return await self._make()

    async def _made_ahead(self) -> Sidecar | None:
        making = self._making.popleft()
        try:
            return await asyncio.shield(making)
        except BackendError as error:  # whoever needs it makes one, and hears why that fails
            log.info("a sidecar could not be made ahead: %s", error)
            return None
        except asyncio.CancelledError:
            self._making.appendleft(making)
            raise

    async def give(self, sidecar: Sidecar) -> None:
        """Take a sidecar back. One that cannot be wiped clean is deleted, volume and all."""
        try:
            await sidecar.wipe()
        except BackendError as error:
            log.info("a sidecar is replaced: %s", error)
            await sidecar.discard()
        else:
            self._idle.append(sidecar)

    async def _make_in_turn(self, turns: asyncio.Semaphore) -> Sidecar:
        async with turns:
            return await self._make()

    async def _make(self) -> Sidecar:
        name = secrets.token_hex(8)
        arrival = self._door.expect(name)
        container = ""
        try:
            container = await self._engine.create(self._config(name), {LABEL_ROLE: "sidecar"})
            await self._engine.call("start", container)
            ended = self._engine.ended(container)
            await asyncio.wait({arrival, ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                raise BackendError(Cause("launch", "a sidecar does not report: it cannot reach the run's socket"))
            connection, listening, vsock = arrival.result()
            details = await self._engine.call("inspect_container", container)
            volume = next(mount["Name"] for mount in details["Mounts"] if mount["Destination"] == FOLDER)
            served = await self._serve(listening)
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 18)
            return Sidecar(self._engine, container, volume, served, reader, writer, vsock)
        except BaseException:
            if arrival.done() and not arrival.cancelled():
                arrival.result().close()
            if container:
                await self._engine.remove(container)
            raise
        finally:
            self._door.forget(name)

    def _config(self, name: str) -> dict[str, object]:
        agent, size = self._agent, self._agent.limits.disk_mb
        uid, gid = agent.user.split(":")
        options = {
            "type": "tmpfs",
            "device": "tmpfs",
            "o": f"size={size}m,nr_inodes={8 * MOST_FILES},uid={uid},gid={gid},mode=0700,nosuid,nodev",
        }
        memory = (OVERHEAD_MB + size) << 20
        return {
            "Image": self._image,
            "Entrypoint": self._entrypoint,
            "Cmd": [DOOR, FOLDER, str(PORT), name],
            "User": agent.user,
            "HostConfig": {
                "NetworkMode": "none" if agent.network == "sealed" else "bridge",
                "Mounts": [
                    {"Type": "bind", "Source": str(self._door.path), "Target": DOOR},
                    {
                        "Type": "volume",
                        "Target": FOLDER,
                        "VolumeOptions": {
                            "NoCopy": True,
                            "DriverConfig": {"Name": "local", "Options": options},
                            # found by it when a sidecar ended before the agent that used its volume
                            "Labels": self._engine.labels,
                        },
                    },
                ],
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": 16,
                "LogConfig": {"Type": "none"},
                # It ends by itself when the supervisor does, and then nothing of it stays.
                "AutoRemove": True,
            },
        }
