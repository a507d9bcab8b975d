"""Agents in Docker containers: sealed off from every network by default, limited, without privileges.

The agent's container joins the network namespace of a sidecar (sidecar.py), in which the gateway's own listening
socket is all that there is. Its root is read-only; what it writes goes to `/rollout` (task, home, working directory)
and `/tmp`, both in memory and limited. When it has ended, the working directory is copied out for the grader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aglite.config import Agent
from aglite.errors import AgliteError, RecipeError
from aglite.paths import RunDir
from aglite.rollouts.backends import Launch
from aglite.rollouts.backends.contained import LOST_OUTPUT_END_S, OUTPUT_END_S, Contained, exit_code
from aglite.rollouts.backends.container import container_config
from aglite.rollouts.backends.engine import (
    LABEL_ATTEMPT,
    LABEL_ROLE,
    LABEL_ROLLOUT,
    Engine,
    connect,
    socket_path,
)
from aglite.rollouts.backends.local import remove_attempts, remove_tree
from aglite.rollouts.backends.output import Output
from aglite.rollouts.backends.pack import pack
from aglite.rollouts.backends.sidecar import Sidecar
from aglite.rollouts.backends.sidecars import PORT, Serve, Sidecars
from aglite.rollouts.backends.unpack import unpack_left
from aglite.rollouts.causes import BackendError, Cause
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.process import UNKILLABLE_S, Exit
from aglite.rollouts.reaper import Reaper

log = logging.getLogger("aglite.rollouts")

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What Docker sets where an image sets none."""


class DockerBackend:
    name = "docker"
    base_url = f"http://127.0.0.1:{PORT}"
    starts_slowly = False

    def __init__(
        self, run_dir: RunDir, reaper: Reaper, agent: Agent, programs: Mapping[str, str], serve: Serve
    ) -> None:
        """`programs`: what is started in containers, by the setting that names it."""
        self._agent = agent
        self._programs = programs
        self._reaper = reaper
        self._scratch = run_dir.scratch.resolve()
        self._engine = Engine(str(run_dir.path.resolve()), reaper.value)
        self._sidecars = Sidecars(self._engine, agent, run_dir.path.resolve() / "door.sock", serve)
        self._image: dict[str, Any] = {}

    async def open(self) -> Mapping[str, Any]:
        self._image = await asyncio.to_thread(check_engine, self._agent)
        self._reaper.watch_docker(socket_path())
        await self._engine.open()
        await self._engine.sweep()
        await self._check_programs()
        await self._sidecars.open()
        return self._image

    async def close(self) -> None:
        if self._engine.is_open:
            try:
                await self._sidecars.close()
            except BackendError as error:
                log.warning("containers of this run may be left until it starts again: %s", error)
            await self._engine.close()

    async def start(self, launch: Launch) -> DockerRunning:
        archive, size = await asyncio.to_thread(pack, launch)
        with archive:
            sidecar = await self._sidecars.take()
            container = ""
            output = None
            try:
                await sidecar.fill(archive, size)
                labels = {
                    LABEL_ROLE: "agent",
                    LABEL_ROLLOUT: launch.rollout_id,
                    LABEL_ATTEMPT: str(launch.attempt),
                }
                container = await self._engine.create(
                    container_config(launch, self._agent, self._image["image_id"], sidecar), labels
                )
                streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                attached = await self._engine.call("attach_socket", container, params=streams)
                launch.log.parent.mkdir(parents=True, exist_ok=True)
                output = Output(attached, LogFile(launch.log, launch.limits.log_bytes, redactor=launch.redactor))
                await self._engine.call("start", container)
                output.send(launch.stdin.encode())
            except BaseException:
                if output is not None:
                    output.close()
                try:
                    if container:
                        await self._engine.remove(container)
                finally:
                    await sidecar.discard()
                raise
        folder = self._scratch / f"{launch.rollout_id}.{launch.attempt}"
        return DockerRunning(self._engine, self._sidecars, sidecar, container, output, folder, launch, self._agent)

    async def sweep(self) -> list[str]:
        if not self._engine.is_open:
            return []
        try:
            ended = await self._engine.sweep("agent")
        except BackendError as error:
            log.warning("containers of this run may be left until it starts again: %s", error)
            ended = []
        await asyncio.to_thread(remove_attempts, self._scratch)
        return ended

    async def _check_programs(self) -> None:
        """Look for the programs in the image: a container that lacks its own would start all the same, since the init
        process is there."""
        image = await self._engine.call("inspect_image", self._image["image_id"])
        env = dict(entry.split("=", 1) for entry in image["Config"].get("Env") or ())
        folders = env.get("PATH", DEFAULT_PATH).split(":")
        config = {"Image": self._image["image_id"], "Cmd": ["x"], "HostConfig": {"NetworkMode": "none"}}
        container = await self._engine.create(config, {LABEL_ROLE: "check"})
        try:
            for setting, program in self._programs.items():
                if "/" in program and not program.startswith("/"):
                    continue  # one of the recipe's files
                places = [program] if "/" in program else [f"{folder}/{program}" for folder in folders]
                if not await self._has_one(container, places):
                    raise RecipeError(
                        f"{setting}: {self._agent.image} has no program {program!r}",
                        "correct its path"
                        if "/" in program
                        else f"install it in the image; looked for in {':'.join(folders)}",
                    )
        finally:
            await self._engine.remove(container)

    async def _has_one(self, container: str, places: Sequence[str]) -> bool:
        for place in places:
            if await self._engine.quietly("get_archive", container, place):
                return True
        return False


class DockerRunning(Contained):
    def __init__(
        self,
        engine: Engine,
        sidecars: Sidecars,
        sidecar: Sidecar,
        container: str,
        output: Output,
        folder: Path,
        launch: Launch,
        agent: Agent,
    ) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.workdir = folder / "work"
        self.flags: list[str] = []
        self.container = container
        self._engine = engine
        self._sidecars = sidecars
        self._sidecar: Sidecar | None = sidecar
        self._output = output
        self._folder = folder
        self._limits = launch.limits
        self._sealed = agent.network == "sealed"
        self._stopped = False
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        ended = await self._engine.ended(self.container)
        await self._output.finish(LOST_OUTPUT_END_S if ended.lost else OUTPUT_END_S)
        code = exit_code(ended.code)
        cause = None
        if ended.lost:
            cause = Cause("lost", ended.lost)
        elif ended.out_of_memory and code:
            cause = Cause("memory", f"limit {self._limits.memory_mb} MB")
        self.exited.set_result(Exit(code, 0.0, cause))

    async def stop(self, grace_s: float = 0.0) -> list[str]:
        if self._stopped:
            return []
        self._stopped = True
        sidecar, self._sidecar = self._sidecar, None
        assert sidecar is not None
        try:
            await self._end(grace_s)
            # The kernel ended whatever else ran in the container when its first process ended.
            await self._take_files(sidecar)
            await self._engine.remove(self.container)
        except BaseException:
            self._following.cancel()
            self._output.close()
            try:
                await self._engine.remove(self.container)
            finally:
                await sidecar.discard()
            raise
        await self._sidecars.give(sidecar)
        return []

    async def remove(self) -> None:
        await asyncio.to_thread(remove_tree, self._folder)

    async def _end(self, grace_s: float) -> None:
        if not self.exited.done() and grace_s > 0:
            await self._engine.kill(self.container, "SIGTERM")
            await asyncio.wait({self.exited}, timeout=grace_s)
        if not self.exited.done():
            await self._engine.kill(self.container, "SIGKILL")
            await asyncio.wait({self.exited}, timeout=UNKILLABLE_S)
        if not self.exited.done():
            raise BackendError(Cause("lost", f"container {self.container[:12]} does not end on SIGKILL"))

    async def _take_files(self, sidecar: Sidecar) -> None:
        most = self._limits.disk_mb << 20
        archive, left = await sidecar.take(most)
        links, special = await asyncio.to_thread(unpack_left, archive, self._folder, most_bytes=most)
        signs = {
            "symlinks": links,
            "special_files": special + left.special,
            "oversize": left.too_much,
            "network": self._sealed and left.unroutable,
        }
        self.flags += [flag for flag, count in signs.items() if count]


def check_engine(agent: Agent) -> dict[str, Any]:
    """What is worth keeping of the engine and the agent's image. Raises RecipeError, with the mend, without either."""
    import docker
    import requests

    assert agent.image is not None
    try:
        client = connect(timeout_s=10)
    except AgliteError as error:
        raise RecipeError(f"agent.backend: {error.message}", error.mend) from None
    try:
        image = client.inspect_image(agent.image)
        return {
            "docker": client.version()["Version"],
            "image": agent.image,
            "image_id": image["Id"],
            "repo_digests": image.get("RepoDigests") or [],
        }
    except docker.errors.ImageNotFound:
        raise RecipeError(
            f"agent.image: this engine has no image {agent.image!r}",
            f"docker pull {agent.image}, or make aglite's own images with images/build.sh",
        ) from None
    except docker.errors.APIError as error:
        raise RecipeError(f"agent.image: {agent.image!r}: {error.explanation}", "correct the name") from None
    except requests.RequestException as error:
        raise RecipeError(f"agent.backend: Docker does not answer any more: {error}", "see `docker info`") from None
    finally:
        client.close()
