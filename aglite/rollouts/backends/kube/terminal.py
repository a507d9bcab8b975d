"""A command on a terminal of its own in an agent's container: `kubectl exec -it`, in principle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import aiohttp

from aglite.config import Kubernetes
from aglite.rollouts.backends.kube.api import Api, NoAnswer
from aglite.rollouts.backends.kube.exec import CHUNK, RESIZE, STATUS, STDIN, connect, exit_status
from aglite.rollouts.backends.kube.pods import AGENT

HUNG_UP = 128 + 1

Resize = Callable[[int, int], None]
"""Called with rows and columns."""


def run_on_terminal(
    settings: Kubernetes, selector: str, command: Sequence[str], attach: Callable[[int, Resize], None]
) -> int | None:
    """Run a command beside the agent in the pod that a label selector names; its exit code, None if there is no such
    pod. `attach(descriptor, resize)` has to pass on what is typed and what is said, until the descriptor's end.

    Raises AgliteError, ApiError, NoAnswer or BackendError, ExecError where the container has no such program.
    """
    here, there = socket.socketpair()
    opened: Future[Resize | None] = Future()
    # `attach` waits for the keyboard, and signals come to this thread: the connection has one of its own
    with ThreadPoolExecutor(1, "terminal") as other, here:
        work = other.submit(asyncio.run, _session(settings, selector, command, there, opened))
        resize = opened.result()
        if resize is None:
            return None
        attach(here.fileno(), resize)
        here.close()
        return work.result()


async def _session(
    settings: Kubernetes, selector: str, command: Sequence[str], there: socket.socket, opened: Future[Resize | None]
) -> int:
    """The connection's side: the exit code. `opened` is told when there is one, or why there is none."""
    with there:
        there.setblocking(False)
        try:
            api = await Api.connect(settings)
            try:
                pod = await _pod(api, selector)
                if pod is None:
                    opened.set_result(None)
                    return HUNG_UP
                async with connect(api, pod, AGENT, command, stdin=True, stdout=True, tty=True) as connection:
                    return await _pass_on(connection, there, opened)
            finally:
                await api.close()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
            return HUNG_UP


async def _pod(api: Api, selector: str) -> str | None:
    found = await api.call("GET", f"/api/v1/namespaces/{api.namespace}/pods", query=[("labelSelector", selector)])
    names = [pod["metadata"]["name"] for pod in found["items"] if pod.get("status", {}).get("phase") == "Running"]
    return names[-1] if names else None


async def _pass_on(
    connection: aiohttp.ClientWebSocketResponse, there: socket.socket, opened: Future[Resize | None]
) -> int:
    loop = asyncio.get_running_loop()
    sizes: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    def resize(rows: int, columns: int) -> None:
        with contextlib.suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(sizes.put_nowait, (rows, columns))

    async def send_sizes() -> None:
        while True:
            rows, columns = await sizes.get()
            size = json.dumps({"Width": columns, "Height": rows}).encode()
            await connection.send_bytes(bytes([RESIZE]) + size)

    async def send_keys() -> None:
        while keys := await loop.sock_recv(there, CHUNK):
            await connection.send_bytes(bytes([STDIN]) + keys)

    async def show() -> int:
        async for message in connection:
            if message.type != aiohttp.WSMsgType.BINARY:
                raise NoAnswer(f"exec: {message.type.name}: {message.data!r:.100}")
            if message.data[0] == STATUS:
                return exit_status(message.data[1:])
            await loop.sock_sendall(there, message.data[1:])
        raise NoAnswer("the connection to its pod broke off")

    opened.set_result(resize)
    showing, typing, sizing = (asyncio.ensure_future(work) for work in (show(), send_keys(), send_sizes()))
    try:
        await asyncio.wait({showing, typing}, return_when=asyncio.FIRST_COMPLETED)
        if typing.done() and not typing.exception() and not showing.done():
            return HUNG_UP
        return await showing  # what breaks the sending ends this, too
    finally:
        for work in (showing, typing, sizing):
            work.cancel()
        await asyncio.gather(showing, typing, sizing, return_exceptions=True)
