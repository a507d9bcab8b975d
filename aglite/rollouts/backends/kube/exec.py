"""Commands in the containers of a pod, and files through them: `kubectl exec` and `kubectl cp`, in principle."""

from __future__ import annotations

import asyncio
import json
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from typing import IO, Any

import aiohttp

from aglite.rollouts.backends.contained import MOST_FILES
from aglite.rollouts.backends.kube.api import Api, NoAnswer

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)
"""Channels of the protocol v4.channel.k8s.io: the first byte of each message."""

CHUNK = 1 << 17

READY = "ready"
"""The file whose presence ends the container that waits for files."""

TAKE = resources.files(__package__).joinpath("take.sh").read_text()


class ExecError(Exception):
    """The command ran, or could not, and it is not the API server's fault."""


class TooLarge(ExecError):
    """It says more than it was allowed to."""


def connect(
    api: Api, pod: str, container: str, command: Sequence[str], **streams: bool
) -> AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
    """A connection to a command that is started with some of the streams stdin, stdout, stderr and tty."""
    query = [("container", container), *(("command", word) for word in command)]
    query += [(name, str(wanted).lower()) for name, wanted in streams.items()]
    return api.websocket(f"/api/v1/namespaces/{api.namespace}/pods/{pod}/exec", query)


async def run(
    api: Api,
    pod: str,
    container: str,
    command: Sequence[str],
    stdin: IO[bytes] | None = None,
    on_output: Callable[[bytes], Any] = lambda data: None,
    most_bytes: int = 1 << 16,
) -> str:
    """Run a command to its end; what it printed to its standard error. `on_output` gets its standard output.

    The protocol cannot end a standard input: the command must know how much it is to read. Raises ExecError when it
    ends other than with 0, TooLarge, ApiError when the server refuses, NoAnswer when the connection ends before.
    """
    streams = {"stdin": stdin is not None, "stdout": True, "stderr": True, "tty": False}
    async with connect(api, pod, container, command, **streams) as connection:
        sending = asyncio.create_task(_send(connection, stdin)) if stdin else None
        said = b""
        try:
            async for message in connection:
                if message.type != aiohttp.WSMsgType.BINARY:
                    raise NoAnswer(f"exec: {message.type.name}: {message.data!r:.100}")
                channel, data = message.data[0], message.data[1:]
                most_bytes -= len(data)
                if most_bytes < 0:
                    raise TooLarge("it says too much")
                if channel == STDOUT:
                    on_output(data)
                elif channel == STDERR:
                    said = (said + data)[-4096:]
                elif channel == STATUS:
                    if code := exit_status(data, said):
                        raise ExecError(f"exit code {code}: {_last_words(said)}")
                    return said.decode("utf-8", "replace")
        finally:
            if sending is not None:
                sending.cancel()
    raise NoAnswer("exec: the connection ended before the command")


async def _send(connection: aiohttp.ClientWebSocketResponse, source: IO[bytes]) -> None:
    try:
        while data := source.read(CHUNK):
            await connection.send_bytes(bytes([STDIN]) + data)
    except (aiohttp.ClientError, OSError):
        return  # whoever reads the connection sees its end, too


def exit_status(data: bytes, said: bytes = b"") -> int:
    """The exit code that a message of STATUS tells. Raises ExecError where the command did not run."""
    status = json.loads(data)
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or ()
    codes = [one.get("message") for one in causes if one.get("reason") == "ExitCode"]
    if not codes:
        raise ExecError(_last_words(said) or status.get("message") or status.get("reason") or "")
    return int(codes[0])


def _last_words(said: bytes) -> str:
    return said.decode("utf-8", "replace").strip()[-300:]


async def fill(api: Api, pod: str, container: str, folder: str, archive: IO[bytes], size: int) -> None:
    """Unpack a gzipped tar of `size` bytes in `folder`, and say that it is there. Doing it again does no harm."""
    archive.seek(0)
    script = f'cd "$1" && umask 022 && head -c {size} | tar -xzof - && : > {READY}'
    await run(api, pod, container, ["sh", "-c", script, "sh", folder], archive)


async def take(api: Api, pod: str, container: str, folder: str, most_bytes: int) -> tuple[IO[bytes], int, int]:
    """A tar of `folder`/work, how many entries it leaves out as too much, and how many as special."""
    file = tempfile.SpooledTemporaryFile(max_size=1 << 20)  # noqa: SIM115 - it is handed on
    try:
        command = ["sh", "-c", TAKE, "sh", str(most_bytes), str(MOST_FILES), folder]
        # headers, long names and padding, besides what the files hold
        room = most_bytes + 8192 * (MOST_FILES + 1)
        said = await run(api, pod, container, command, on_output=file.write, most_bytes=room)
        left = next((line for line in said.splitlines() if line.startswith("left ")), None)
        if left is None:
            raise ExecError(f"it does not say what it left out: {said.strip()[-200:]}")
        if file.tell() == 0:
            file.write(bytes(2 * tarfile.BLOCKSIZE))  # an empty tar: there is no working directory any more
    except BaseException:
        file.close()
        raise
    file.seek(0)
    too_much, special = map(int, left.removeprefix("left ").split())
    return file, too_much, special
