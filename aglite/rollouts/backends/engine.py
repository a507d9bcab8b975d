"""The Docker Engine behind its SDK: calls in threads, ends of containers as events, errors as causes."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aglite.errors import AgliteError, RecipeError
from aglite.rollouts.causes import BackendError, Cause

if TYPE_CHECKING:
    import docker

log = logging.getLogger("aglite.rollouts")

CALL_TIMEOUT_S = 60
CALLS_AT_ONCE = 12
AWAY_S = 15.0
"""How long the engine may be away before the containers that it ran are given up."""

KILLED = 128 + 9
OTHERS_S = 1.0
"""How long it is awaited what an end by SIGKILL came from: somebody else, or memory that was used up."""

REMOVE_AGAIN_S = (0.5, 2.0, 8.0)
"""When a container that could not be removed is tried again: what it has mounted may be in use for a moment."""

LABEL_RUN = "aglite.run"
LABEL_SUPERVISOR = "aglite.supervisor"
LABEL_ROLE = "aglite.role"
LABEL_ROLLOUT = "aglite.rollout"
LABEL_ATTEMPT = "aglite.attempt"


def socket_path() -> str:
    """The engine's Unix socket. Raises RecipeError for an engine that is elsewhere: sidecars reach the gateway through
    a socket of this machine."""
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith("unix://"):
        raise RecipeError(
            f"agent.backend: docker needs an engine on this machine, and DOCKER_HOST is {address}",
            "unset DOCKER_HOST, or set it to a unix:// address",
        )
    return address.removeprefix("unix://")


def connect(timeout_s: float = CALL_TIMEOUT_S) -> docker.APIClient:
    """A client of this machine's engine. Raises AgliteError with the mend if none answers."""
    import docker

    path = socket_path()
    try:
        client = docker.APIClient(base_url=f"unix://{path}", version="auto", timeout=timeout_s)
    except docker.errors.DockerException as error:
        raise AgliteError(f"Docker does not answer at {path}: {_reason(error, path)}", _mend(path)) from None
    return client


def _reason(error: BaseException, path: str) -> str:
    if not os.path.exists(path):
        return "there is no such socket"
    if not os.access(path, os.R_OK | os.W_OK):
        return "permission denied"
    return str(error)[:200]


def _mend(path: str) -> str:
    if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
        return "add yourself to the group docker (sudo usermod -aG docker $USER) and log in again"
    return "install or start the Docker Engine (Debian: apt install docker.io; systemctl start docker)"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    code: int
    out_of_memory: bool = False
    lost: str = ""
    """Why the end says nothing of the program in it: its engine was gone."""


class Engine:
    """One engine, for one run: everything that it makes is labelled with the run and the supervisor."""

    def __init__(self, run: str, supervisor: str) -> None:
        self.labels = {LABEL_RUN: run, LABEL_SUPERVISOR: supervisor}
        self._client: docker.APIClient
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="docker")
        self._ends: dict[str, asyncio.Future[Ended]] = {}
        self._ours: set[str] = set()
        self._others: set[str] = set()
        """Containers that a signal was sent to through the engine, by us and by somebody else."""
        self._unwanted: set[asyncio.Task[None]] = set()
        """What removes containers whose maker was cancelled while the engine made them."""
        self._watcher: threading.Thread | None = None
        self._stream: Any = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        """Connect, and watch for ends from now on. Raises AgliteError."""
        self._loop = asyncio.get_running_loop()
        self._client = await asyncio.to_thread(connect)
        self._stream = await self._loop.run_in_executor(self._threads, self._listen, int(time.time()))
        self._watcher = threading.Thread(target=self._watch, name="docker events", daemon=True)
        self._watcher.start()

    @property
    def is_open(self) -> bool:
        return self._stream is not None and not self._closed

    async def close(self) -> None:
        await asyncio.gather(*self._unwanted)
        self._closed = True
        self._stream.close()
        self._threads.shutdown(wait=False)
        self._client.close()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One method of the SDK's APIClient, in a thread. Raises BackendError or RecipeError."""
        work = functools.partial(getattr(self._client, method), *args, **kwargs)
        try:
            return await self._loop.run_in_executor(self._threads, work)
        except Exception as error:
            raise explain(error) from error

    async def quietly(self, method: str, *args: Any, **kwargs: Any) -> bool:
        """`call` for what may have happened already; False if the engine has no such container (in such a state)."""
        import docker

        try:
            await self.call(method, *args, **kwargs)
        except (BackendError, RecipeError) as error:
            cause = error.__cause__
            if isinstance(cause, docker.errors.APIError) and cause.status_code in (404, 409):
                return False
            raise
        return True

    async def create(self, config: Mapping[str, Any], labels: Mapping[str, str]) -> str:
        """Create a container, labelled from the first moment on; its id. When this is cancelled, none is left."""
        config = {**config, "Labels": {**self.labels, **labels}}
        making = asyncio.ensure_future(self.call("create_container_from_config", config))
        try:
            made = await asyncio.shield(making)
        except asyncio.CancelledError:  # the engine has been asked already, and makes it all the same
            removing = asyncio.create_task(self._remove_unwanted(making))
            self._unwanted.add(removing)
            removing.add_done_callback(self._unwanted.discard)
            raise
        self._ends[made["Id"]] = self._loop.create_future()
        return made["Id"]

    async def _remove_unwanted(self, making: asyncio.Future[dict[str, Any]]) -> None:
        try:
            await self.remove((await making)["Id"])
        except (BackendError, RecipeError) as error:
            log.warning("a container of this run may be left until it starts again: %s", error)

    async def kill(self, container: str, signal: str) -> None:
        """Send a signal to a container's first process, if it runs."""
        self._ours.add(container)
        await self.quietly("kill", container, signal)

    async def remove(self, container: str) -> None:
        """End and delete a container, with its own volumes; one that is gone already is fine."""
        self._ours.add(container)
        self._ends.pop(container, None)
        problem = await self._try_to_remove(container)
        for wait_s in REMOVE_AGAIN_S:
            if problem is None:
                break
            await asyncio.sleep(wait_s)
            problem = await self._try_to_remove(container)
        if problem is not None:
            raise problem
        self._ours.discard(container)
        self._others.discard(container)

    async def _try_to_remove(self, container: str) -> BackendError | None:
        """Why a container is still there; None when it is gone. Raises BackendError if the engine does not answer."""
        import docker

        try:
            if await self.quietly("remove_container", container, force=True, v=True):
                return None
            # It is going already, as sidecars do by themselves, or gone. An engine that ends meanwhile leaves it dead.
            await self.quietly("wait", container, timeout=CALL_TIMEOUT_S, condition="removed")
            if not await self.quietly("inspect_container", container):
                return None
        except BackendError as error:
            if not isinstance(error.__cause__, docker.errors.APIError):
                raise
            return error
        return BackendError(Cause("backend", f"container {container[:12]} is still there"))

    def ended(self, container: str) -> asyncio.Future[Ended]:
        """Done when the container has ended. Of containers made by `create`."""
        return self._ends[container]

    async def sweep(self, role: str | None = None) -> list[str]:
        """End and delete the run's containers, of all its supervisors; which ones there were. Of every role: with
        volumes that outlived them."""
        labels = [f"{LABEL_RUN}={self.labels[LABEL_RUN]}", *([f"{LABEL_ROLE}={role}"] if role else [])]
        found = await self.call("containers", all=True, filters={"label": labels})
        ids = [container["Id"] for container in found]
        await asyncio.gather(*(self.remove(id) for id in ids))
        if role is None:
            held = await self.call("volumes", filters={"label": labels})
            for volume in held["Volumes"] or ():
                await self.quietly("remove_volume", volume["Name"])
        return ids

    # the thread that watches

    def _listen(self, since: int) -> Any:
        supervisor = f"{LABEL_SUPERVISOR}={self.labels[LABEL_SUPERVISOR]}"
        return self._client.events(since=since, decode=True, filters={"label": supervisor, "event": ["die", "kill"]})

    def _watch(self) -> None:
        away_since: float | None = None
        while not self._closed:
            try:
                if away_since is not None:
                    self._stream = self._listen(int(time.time()))
                    self._catch_up()
                    away_since = None
                for event in self._stream:
                    if event["status"] == "die":
                        self._tell(event["id"])
                    elif event["id"] not in self._ours:
                        self._others.add(event["id"])
            except Exception as error:  # whatever breaks the stream, the mend is to connect again
                if not self._closed:
                    log.debug("events of Docker: %s", error)
            if self._closed:
                return
            now = time.monotonic()
            if away_since is None:
                away_since = now
                log.warning("lost the connection to Docker; connecting again")
            elif now - away_since > AWAY_S:
                for container in list(self._ends):
                    self._set(container, Ended(KILLED, lost=f"Docker has not answered for {AWAY_S:.0f} s"))
            time.sleep(0.3)

    def _catch_up(self) -> None:
        """What ended while nobody listened, or with the engine itself."""
        supervisor = f"{LABEL_SUPERVISOR}={self.labels[LABEL_SUPERVISOR]}"
        there = {one["Id"]: one["State"] for one in self._client.containers(all=True, filters={"label": [supervisor]})}
        for container in list(self._ends):
            if there.get(container) not in ("running", "created"):
                self._set(container, Ended(KILLED, lost="Docker was restarted, or its connection broke"))

    def _tell(self, container: str) -> None:
        if container not in self._ends:
            return
        self._set(container, self._look(container))

    def _look(self, container: str) -> Ended:
        try:
            state = self._client.inspect_container(container)["State"]
        except Exception as error:  # removed by somebody, or the engine is going away
            return Ended(KILLED, lost=f"its container is gone: {str(error)[:200]}")
        return Ended(state["ExitCode"], out_of_memory=state["OOMKilled"])

    def _set(self, container: str, ended: Ended) -> None:
        def settle(ended: Ended) -> None:
            end = self._ends.get(container)
            if end is not None and not end.done():
                end.set_result(ended)

        def work(ended: Ended, for_the_last_time: bool = False) -> None:
            if ended.code != KILLED or ended.lost or ended.out_of_memory or container in self._ours:
                settle(ended)
            elif container in self._others:
                settle(Ended(KILLED, lost="somebody ended its container"))
            elif for_the_last_time:
                settle(ended)
            else:
                # The engine tells of a signal that it was asked to send, and of memory that was used up, a moment
                # before or after the end.
                self._loop.call_later(OTHERS_S, look_again)

        def look_again() -> None:
            if not self._closed:
                self._threads.submit(lambda: self._loop.call_soon_threadsafe(work, self._look(container), True))

        if not self._closed:
            self._loop.call_soon_threadsafe(work, ended)


def explain(error: Exception) -> Exception:
    """What a failed call means: BackendError with its cause, or RecipeError where only the recipe can mend it."""
    import docker
    import requests

    if isinstance(error, docker.errors.ImageNotFound):
        return BackendError(Cause("image", str(error.explanation)[:300]))
    if isinstance(error, docker.errors.APIError):
        text = str(error.explanation)
        if "docker-init" in text:
            return BackendError(Cause("backend", "Docker has no docker-init, which comes with it (Debian: docker.io)"))
        if "No such image" in text:
            return BackendError(Cause("image", text[:300]))
        if any(part in text for part in NO_PROGRAM):
            return RecipeError(
                f"agent.command: its program cannot be started in the image: {_tail(text)}",
                "name a program that agent.image has, and make scripts of the recipe executable",
            )
        return BackendError(Cause("launch", text[:300]))
    if isinstance(error, requests.RequestException | OSError | docker.errors.DockerException):
        return BackendError(Cause("backend", f"Docker: {str(error)[:300]}"))
    return error


NO_PROGRAM = ("executable file not found", "exec format error")


def _tail(text: str) -> str:
    return text.rpartition("container process: ")[2][:200] or text[:200]
