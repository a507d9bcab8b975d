"""The node of cluster.py: runs pods as processes of this machine, each container in a process namespace of its own.

Containers have no file system of their own: the paths of their volumes are replaced by those of folders, in commands
and variables. They run as the pod's user, who must be nobody else's on this machine: agents are ended by signals to all
processes of their namespace. Needs root.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import os
import shutil
import signal
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp.web
import kubelet_streams

if TYPE_CHECKING:
    from cluster import Cluster

LINE = 16 * 1024
"""Container runtimes cut longer lines."""
PAGE = os.sysconf("SC_PAGE_SIZE")
HOST_SPACE = os.readlink("/proc/self/ns/pid")
OWN_SPACE = f'[ "$(readlink /proc/self/ns/pid)" != "{HOST_SPACE}" ] || exit 125; exec "$@"'
"""Nothing is run in this machine's own process namespace, whatever goes wrong."""


class Container:
    """One process, its output, and what is said of it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.environment: dict[str, str] = {}
        self.ended: asyncio.Event = asyncio.Event()
        self.output: list[tuple[str, bytes, bool]] = []
        """(time, piece, whether a line begins with it)."""
        self.printed = asyncio.Event()
        self.closed = False
        self.out_of_memory = False
        self.state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}

    @property
    def name(self) -> str:
        return self.spec["name"]

    def status(self) -> dict[str, Any]:
        return {"name": self.name, "image": self.spec["image"], "state": self.state, "ready": "running" in self.state}

    def tell(self) -> None:
        printed, self.printed = self.printed, asyncio.Event()
        printed.set()


class Pod:
    def __init__(self, pod: dict[str, Any], folder: Path) -> None:
        self.name = pod["metadata"]["name"]
        self.spec = pod["spec"]
        self.folder = folder
        self.inits = [Container(one) for one in self.spec.get("initContainers") or ()]
        self.mains = [Container(one) for one in self.spec["containers"]]
        self.task: asyncio.Task[None]
        self.lost = False
        self.ending = False
        self.starting = asyncio.Lock()

    def container(self, name: str) -> Container:
        return next(one for one in [*self.inits, *self.mains] if one.name == name)


class Kubelet:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.images = {"agent-image", "files-image"}
        self.may_pull = asyncio.Event()
        """Images that are there take until then."""
        self.may_pull.set()
        self.pods: dict[str, Pod] = {}
        self.most_at_once = 0
        self.cut_off: set[str] = set()
        """Pods whose node is gone: nobody ends them or tells of them."""
        self.break_exec = 0
        """How many further exec connections break in the middle."""
        self.break_logs = 0
        self._top = Path(tempfile.mkdtemp(prefix="pods-", dir="/var/tmp"))
        self._top.chmod(0o755)
        self.shared = self._top / "shared"
        """All pods can look into it."""
        self.shared.mkdir()
        (self._top / "bin").mkdir()
        (self._top / "bin" / "python").symlink_to("/usr/bin/python3")  # ours may be in a folder of root's

    async def close(self) -> None:
        self.cut_off.clear()
        for name in list(self.pods):
            await self.kill(name, 0)
        shutil.rmtree(self._top, ignore_errors=True)

    def run(self, pod: dict[str, Any]) -> None:
        folder = self._top / pod["metadata"]["name"]
        made = self.pods[pod["metadata"]["name"]] = Pod(pod, folder)
        made.task = asyncio.create_task(self._run(made))

    async def _run(self, pod: Pod) -> None:
        pod.folder.mkdir()
        for volume in pod.spec.get("volumes") or ():
            (pod.folder / volume["name"]).mkdir()
            (pod.folder / volume["name"]).chmod(0o777)
        self.report(pod, phase="Pending", startTime="2026-01-01T00:00:00Z")
        if not await self._pull(pod):
            return
        for container in pod.inits:
            await self._start(pod, container)
            await container.ended.wait()
            if container.state["terminated"]["exitCode"]:
                self.report(pod, phase="Failed")
                return
        for container in pod.mains:
            await self._start(pod, container)
        self.most_at_once = max(self.most_at_once, sum("running" in one.mains[0].state for one in self.pods.values()))
        for container in pod.mains:
            await container.ended.wait()
        failed = any(one.state["terminated"]["exitCode"] for one in pod.mains)
        self.report(pod, phase="Failed" if failed else "Succeeded")

    async def _pull(self, pod: Pod) -> bool:
        await self.may_pull.wait()
        for container in [*pod.inits, *pod.mains]:
            if container.spec["image"] not in self.images:
                for reason in ("ErrImagePull", "ImagePullBackOff"):
                    message = f"failed to pull image {container.spec['image']}: not found"
                    container.state = {"waiting": {"reason": reason, "message": message}}
                    self.report(pod)
                    await asyncio.sleep(0.1)
                return False
        return True

    def report(self, pod: Pod, **more: Any) -> None:
        """Write a pod's status to the API server."""
        there = self.cluster.server.find("pods", pod.name)
        if there is None or pod.lost:
            return
        status = {
            **there.get("status", {}),
            "phase": "Running" if "running" in pod.mains[0].state else "Pending",
            **more,
        }
        status["initContainerStatuses"] = [copy.deepcopy(one.status()) for one in pod.inits]
        status["containerStatuses"] = [copy.deepcopy(one.status()) for one in pod.mains]
        self.cluster.server.put("pods", {**there, "status": status})

    async def _start(self, pod: Pod, container: Container) -> None:
        async with pod.starting:
            if not pod.ending:
                await self._spawn(pod, container)

    async def _spawn(self, pod: Pod, container: Container) -> None:
        spec = container.spec
        command = [self._here(pod, spec, word) for word in spec["command"]]
        cwd = self._here(pod, spec, spec.get("workingDir", "/"))
        container.environment = self._environment(pod, spec)
        container.process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *self._as_user(pod),
            *("sh", "-c", OWN_SPACE, "sh", *command),
            cwd=cwd,
            env=container.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        while container.process.returncode is None and not _has_own_space(container.process.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        container.state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        self.report(pod)
        self.cluster.do(self._read(container))
        self.cluster.do(self._attend(pod, container))

    def _environment(self, pod: Pod, spec: dict[str, Any]) -> dict[str, str]:
        env = {"PATH": f"{self._top}/bin:/usr/local/bin:/usr/bin:/bin"}
        for one in spec.get("env") or ():
            if "value" in one:
                value = "".join(self._here(pod, spec, one["value"]))
            else:
                key = one["valueFrom"]["secretKeyRef"]
                secret = self.cluster.server.find("secrets", key["name"])
                value = base64.b64decode(secret["data"][key["key"]]).decode()
            env[one["name"]] = value
        return env

    def _here(self, pod: Pod, spec: dict[str, Any], text: str) -> str:
        """A container's text with the paths of its volumes as they are on this machine."""
        for mount in spec.get("volumeMounts") or ():
            place = mount["mountPath"]
            if text == place or place != "/tmp":
                text = text.replace(place, str(pod.folder / mount["name"]))
        return text

    async def _read(self, container: Container) -> None:
        begins, stamp = True, ""
        while data := await container.process.stdout.read(LINE):
            for piece in data.splitlines(keepends=True):
                stamp = _now() if begins else stamp
                container.output.append((stamp, piece, begins))
                begins = piece.endswith(b"\n")
            container.tell()
        container.closed = True
        container.tell()

    async def _attend(self, pod: Pod, container: Container) -> None:
        limit = container.spec["resources"]["limits"]["memory"]
        most = int(limit.removesuffix("Mi")) << 20
        waiting = asyncio.ensure_future(container.process.wait())
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=0.1)
            if not waiting.done() and _memory(container.process.pid) > most:
                container.out_of_memory = True
                _signal(container, signal.SIGKILL)
        code = waiting.result()
        while not container.closed:  # the pipe is closed when the last process of the namespace is gone
            await container.printed.wait()
        ended: dict[str, Any] = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Error" if code else "Completed",
        }
        if container.out_of_memory:
            ended["reason"] = "OOMKilled"
        container.state = {"terminated": ended}
        container.ended.set()
        self.report(pod)

    async def kill(self, name: str, grace_s: float) -> bool:
        """End a pod's containers; False if its node does not do it."""
        pod = self.pods.get(name)
        if name in self.cut_off:
            return False
        if pod is None:
            return True
        pod.ending = True
        async with pod.starting:
            pod.task.cancel()
        running = [one for one in [*pod.inits, *pod.mains] if one.process and one.process.returncode is None]
        for container in running:
            _signal(container, signal.SIGTERM)
        waits = [asyncio.ensure_future(one.process.wait()) for one in running]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for container in running:
            _signal(container, signal.SIGKILL)
        for container in running:
            await container.ended.wait()
        self.pods.pop(name, None)
        shutil.rmtree(pod.folder, ignore_errors=True)
        return True

    # what the API server passes on

    async def serve(self, what: str, name: str, request: Any) -> aiohttp.web.StreamResponse:
        pod = self.pods.get(name)
        if pod is None:
            return aiohttp.web.json_response(
                {"kind": "Status", "code": 404, "message": f'pods "{name}" not found'}, status=404
            )
        if name in self.cut_off:
            return aiohttp.web.json_response({"code": 500, "message": "error dialing backend"}, status=500)
        container = pod.container(request.query["container"])
        if what == "exec":
            return await kubelet_streams.exec(self, pod, container, request)
        if container.process is None:
            return aiohttp.web.json_response({"code": 400, "message": "container is waiting to start"}, status=400)
        return await kubelet_streams.log(self, container, request)

    def inside(self, pod: Pod, container: Container, command: list[str], *before: str) -> dict[str, Any]:
        """How to run one more command in a container: arguments of create_subprocess_exec. `before` it, as its
        user, a program of this machine."""
        assert container.process is not None
        return {
            "args": (
                "nsenter",
                f"--pid=/proc/{container.process.pid}/ns/pid_for_children",
                f"--mount=/proc/{container.process.pid}/ns/mnt",
                f"--wd={self._here(pod, container.spec, container.spec.get('workingDir', '/'))}",
                *self._as_user(pod),
                *before,
                *("sh", "-c", OWN_SPACE, "sh", *(self._here(pod, container.spec, word) for word in command)),
            ),
            "env": container.environment,
        }

    def _as_user(self, pod: Pod) -> tuple[str, ...]:
        user = pod.spec["securityContext"]
        return (
            *("setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", "--clear-groups"),
            # once more, because a change of the user takes it back
            *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"),
        )


_times = itertools.count(time.time_ns(), 1000)


def _now() -> str:
    """The time for a line of a log; no two are the same."""
    nanos = next(_times)
    when = datetime.fromtimestamp(nanos // 1_000_000_000, UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{nanos % 1_000_000_000:09d}Z"


def _has_own_space(pid: int) -> bool:
    """Whether there is a process space for the children of a process, with a first one in it that others can join."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid_for_children") != HOST_SPACE
    except FileNotFoundError:  # the space has been made, and nobody is in it yet; or the process has ended
        return False


def _signal(container: Container, number: int) -> None:
    """Send a signal to the first process of a container, with which all others end."""
    assert container.process is not None
    for child in _children(container.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def _memory(pid: int) -> int:
    """Bytes that the processes below one have."""
    total = 0
    for child in _children(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{child}/statm").read_text().split()[1]) * PAGE
        total += _memory(child)
    return total


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
