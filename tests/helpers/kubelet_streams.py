"""The output of the containers of kubelet.py, and further commands in them: the API's `log` and `exec`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import aiohttp.web

if TYPE_CHECKING:
    from kubelet import Container, Kubelet, Pod

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)


async def log(kubelet: Kubelet, container: Container, request: Any) -> aiohttp.web.StreamResponse:
    response = aiohttp.web.StreamResponse()
    await response.prepare(request)
    since, at = request.query.get("sinceTime", ""), 0
    while True:
        printed = container.printed
        pieces, at = container.output[at:], len(container.output)
        for stamp, piece, begins in pieces:
            if stamp >= since:
                await response.write((stamp.encode() + b" " if begins else b"") + piece)
        if kubelet.break_logs and at:
            kubelet.break_logs -= 1
            request.transport.abort()
            return response
        if container.closed or request.query.get("follow") != "true":
            return response
        await printed.wait()


async def exec(kubelet: Kubelet, pod: Pod, container: Container, request: Any) -> aiohttp.web.StreamResponse:
    process = container.process
    if process is None or process.returncode is not None:
        return aiohttp.web.json_response({"code": 500, "message": "container not found"}, status=500)
    socket = aiohttp.web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=0)
    await socket.prepare(request)
    command = request.query.getall("command")
    if request.query.get("tty") == "true":
        code = await _on_terminal(kubelet.inside(pod, container, command, "setsid", "--ctty"), socket)
    else:
        break_it, kubelet.break_exec = kubelet.break_exec > 0, max(0, kubelet.break_exec - 1)
        code = await _on_pipes(kubelet.inside(pod, container, command), socket, request.transport, break_it)
    status: dict[str, Any] = {"status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}
        status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
    with contextlib.suppress(ConnectionError, RuntimeError):
        await socket.send_bytes(bytes([STATUS]) + json.dumps(status).encode())
    await socket.close()
    return socket


async def _on_pipes(
    inside: dict[str, Any], socket: aiohttp.web.WebSocketResponse, transport: Any, break_it: bool
) -> int:
    pipe = asyncio.subprocess.PIPE
    run = await asyncio.create_subprocess_exec(*inside["args"], stdin=pipe, stdout=pipe, stderr=pipe, env=inside["env"])

    async def pump(source: asyncio.StreamReader, channel: int) -> None:
        while data := await source.read(1 << 16):
            if break_it:
                transport.abort()
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(bytes([channel]) + data)

    async def write(data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            run.stdin.write(data)
            await run.stdin.drain()

    feeding = asyncio.ensure_future(_feed(socket, {STDIN: write}, run))
    try:
        await asyncio.gather(pump(run.stdout, STDOUT), pump(run.stderr, STDERR))
        code = await run.wait()
        if break_it:
            transport.abort()
        return code
    finally:
        run.stdin.close()
        await _end(run, feeding)


async def _on_terminal(inside: dict[str, Any], socket: aiohttp.web.WebSocketResponse) -> int:
    ours, theirs = pty.openpty()
    try:
        run = await asyncio.create_subprocess_exec(
            *inside["args"], stdin=theirs, stdout=theirs, stderr=theirs, env=inside["env"]
        )
    finally:
        os.close(theirs)
    loop = asyncio.get_running_loop()
    said: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # how a terminal ends whose programs have all ended
            data = b""
        if not data:
            loop.remove_reader(ours)
        said.put_nowait(data)

    async def write(data: bytes) -> None:
        os.write(ours, data)

    async def resize(data: bytes) -> None:
        size = json.loads(data)
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))

    loop.add_reader(ours, read)
    feeding = asyncio.ensure_future(_feed(socket, {STDIN: write, RESIZE: resize}, run))
    try:
        while data := await said.get():
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(bytes([STDOUT]) + data)
        return await run.wait()
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        await _end(run, feeding)


async def _feed(
    socket: aiohttp.web.WebSocketResponse,
    channels: dict[int, Callable[[bytes], Awaitable[None]]],
    run: asyncio.subprocess.Process,
) -> None:
    async for message in socket:
        if message.type == aiohttp.WSMsgType.BINARY and message.data[0] in channels:
            await channels[message.data[0]](message.data[1:])
    with contextlib.suppress(ProcessLookupError):  # whoever asked for it is gone
        run.kill()


async def _end(run: asyncio.subprocess.Process, feeding: asyncio.Future[None]) -> None:
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    if run.returncode is None:
        run.kill()
        await run.wait()
