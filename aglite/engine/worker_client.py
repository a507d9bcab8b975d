"""The supervisor's side of a model worker: starts the process, speaks its protocol, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.errors import AgliteError, EngineError
from aglite.worker.io import FrameReader, encode, pack_ids, unpack_floats, unpack_ids

LOG_LINES = 20
"""Lines of the child's log that an error carries."""

_ERRORS = {"AgliteError": AgliteError, "EngineError": EngineError}


@dataclasses.dataclass(slots=True, frozen=True)
class WorkerExit:
    """How the process ended. `code` is negative for a signal; `stopped` means that `stop` asked for it."""

    code: int
    reason: str
    log: tuple[str, ...]
    stopped: bool

    def error(self) -> EngineError:
        lines = "".join(f"\n  | {line}" for line in self.log)
        return EngineError(f"{self.reason}{lines}", "see its log; `aglite up` restarts it from the last checkpoint")


class WorkerClient:
    """A model worker as an Engine, with training and checkpoints. One client runs one process once.

    `command` is extended by `--socket PATH`. The child's output is appended to `log_path`. `on_event(kind, data)` is
    called with its progress: ("loading", {"stage"}), ("train", {"done", "of", ...}).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: dict[str, str] | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        name: str = "model worker",
        start_timeout_s: float = 120.0,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        self.info = EngineInfo(kind="", model="", context_length=0, vocab_size=0)
        self.on_event = on_event
        self.pid: int | None = None
        self.exited: asyncio.Future[WorkerExit]
        self._command = list(command)
        self._log_path = log_path
        self._log_start = 0
        self._env = env
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._numbers = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Chunk | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._socket: _Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._killed_because = ""

    # process

    async def start(self) -> None:
        """Start the process and wait until it has connected. Raises EngineError with its last lines if it does not."""
        loop = asyncio.get_running_loop()
        self.exited = loop.create_future()
        ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        folder = Path(tempfile.mkdtemp(prefix="aglite-worker-"))  # short: a Unix socket's path has at most 107 bytes
        self._socket = _Socket(self._receive, ready)
        server = await loop.create_unix_server(lambda: self._socket, path=str(folder / "socket"))
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--socket",
                    str(folder / "socket"),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    start_new_session=True,
                )
            self.pid = self._process.pid
            self._tasks.append(asyncio.create_task(self._watch_exit(self._process)))
            await asyncio.wait({ready, self.exited}, timeout=self._start_timeout_s, return_when="FIRST_COMPLETED")
            if not ready.done():
                await self._kill(f"the {self._name} did not connect within {self._start_timeout_s:g} s")
                raise (await self.exited).error()
            self._take_info(ready.result())
            self._tasks.append(asyncio.create_task(self._watch_heartbeat()))
        finally:
            server.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the process: close its socket, then SIGKILL its whole process group. Safe to call twice."""
        if self._process is None or self._stopping:
            return
        self._stopping = True
        if self._socket is not None:
            self._socket.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.exited)
        await self._kill(f"the {self._name} did not stop within {timeout_s:g} s")

    async def _kill(self, reason: str) -> None:
        """SIGKILL what is left of the process group; `exited` is set when this returns."""
        if not self.exited.done():
            self._killed_because = reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid or 0, signal.SIGKILL)
        await asyncio.shield(self.exited)

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._killed_because:
            reason = self._killed_because
        elif code < 0:
            reason = f"the {self._name} was killed by {_signal_name(-code)}"
        else:
            reason = f"the {self._name} ended with exit code {code}"
        exit = WorkerExit(code, reason, self._last_lines(), self._stopping)
        error = exit.error() if not self._stopping else EngineError(f"the {self._name} was stopped")
        self.exited.set_result(exit)
        for queue in self._streams.values():
            queue.put_nowait(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        if self._socket is not None:
            self._socket.close()

    async def _watch_heartbeat(self) -> None:
        """Counts its own ticks, not the clock: a supervisor that was suspended must not blame the worker."""
        silent = 0
        while not self.exited.done():
            assert self._socket is not None
            self._socket.heard = False
            await asyncio.sleep(1)
            silent = 0 if self._socket.heard else silent + 1
            if self._socket.closed and silent >= 5:  # normally the process ends with its socket
                await self._kill(f"the {self._name} closed its socket without ending")
            elif silent >= self._heartbeat_timeout_s:
                await self._kill(f"the {self._name} gave no sign of life for {self._heartbeat_timeout_s:g} s")

    def _last_lines(self) -> tuple[str, ...]:
        try:
            with self._log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 16384))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return (f"(its log cannot be read: {error})",)
        return tuple(line for line in text.splitlines() if line.strip())[-LOG_LINES:]

    # frames

    def _receive(self, frame: dict[str, Any]) -> None:
        op = frame["op"]
        if op == "tokens":
            for request_id, ids, logprobs, version, finish_reason in frame["items"]:
                queue = self._streams.get(request_id)
                if queue is not None:
                    queue.put_nowait(Chunk(unpack_ids(ids), unpack_floats(logprobs), version, finish_reason))
        elif op == "failed":
            queue = self._streams.get(frame["id"])
            if queue is not None:
                queue.put_nowait(EngineError(frame["error"], frame.get("mend", "")))
        elif op == "result":
            self._settle(frame["id"], frame.get("value"), None)
        elif op == "error":
            kind = _ERRORS.get(frame["type"], EngineError)
            self._settle(frame["id"], None, kind(frame["message"], frame.get("mend", "")))
        elif op == "event" and self.on_event is not None:
            self.on_event(frame["kind"], frame["data"])

    def _settle(self, call_id: int, value: Any, error: AgliteError | None) -> None:
        future = self._calls.pop(call_id, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _send(self, frame: dict[str, Any]) -> None:
        if self._socket is None:
            raise EngineError(f"the {self._name} has not been started")
        if self.exited.done():
            raise self.exited.result().error()
        self._socket.send(encode(frame))

    async def _call(self, method: str, **args: Any) -> Any:
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._send({"op": "call", "id": number, "method": method, "args": args})
        self._calls[number] = future
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    def _take_info(self, info: dict[str, Any] | None) -> None:
        known = {field.name for field in dataclasses.fields(EngineInfo)}
        if info and known - {"details"} <= info.keys():
            self.info = EngineInfo(**{key: value for key, value in info.items() if key in known})

    # engine

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Chunk]:
        """Sample one response; closing the iterator cancels it. Raises EngineError if the worker refuses or dies."""
        number = next(self._numbers)
        queue: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._send(
            {"op": "generate", "id": number, "prompt": pack_ids(prompt_ids), "params": dataclasses.asdict(params)}
        )
        self._streams[number] = queue
        ended = False
        try:
            while not ended:
                item = await queue.get()
                ended = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            del self._streams[number]
            if not ended and not self.exited.done():
                self._send({"op": "cancel", "id": number})

    async def preempt(self) -> None:
        await self._call("preempt")

    async def resume(self, version: int) -> None:
        await self._call("resume", version=version)

    async def stats(self) -> EngineStats:
        return EngineStats(**await self._call("stats"))

    # model and training

    async def init(
        self, model: Path | str, *, engine: dict[str, Any], trainer: dict[str, Any] | None = None, seed: int = 0
    ) -> EngineInfo:
        """Load a model folder. `engine`: context_length, max_running, kv_tokens, threads. `trainer`: lr, betas,
        weight_decay, grad_clip, kl; None loads no trainer (and is much quicker)."""
        self._take_info(await self._call("init", model=str(model), engine=engine, trainer=trainer, seed=seed))
        return self.info

    async def train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One training step; generations in flight are pre-empted until `resume`. Returns its metrics."""
        return await self._call("train", batch=batch)

    async def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float, source: str = "engine"
    ) -> list[list[float]]:
        """Log-probability of every token but the first of each row, by the `engine` or by the `trainer`."""
        packed = [pack_ids(row) for row in rows]
        values = await self._call("logprobs", rows=packed, temperature=temperature, source=source)
        return [unpack_floats(value) for value in values]

    async def save(self, path: Path | str, meta: dict[str, Any]) -> None:
        """Write a checkpoint folder, whole or not at all. Raises AgliteError when the disk is full."""
        await self._call("save", path=str(path), meta=meta)

    async def load(self, path: Path | str) -> dict[str, Any]:
        """Go back to a checkpoint: weights, optimizer, random state. Returns its meta; `resume` names the version."""
        return await self._call("load", path=str(path))

    async def export(self, path: Path | str) -> None:
        """Write the weights as a Hugging Face folder."""
        await self._call("export", path=str(path))


class _Socket(asyncio.Protocol):
    """The supervisor's end of the one connection that a worker makes."""

    def __init__(self, receive: Callable[[dict[str, Any]], None], ready: asyncio.Future[dict[str, Any]]) -> None:
        self.heard = False
        self.closed = False
        self._receive = receive
        self._ready = ready
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is no subclass
        if self._transport is not None:
            transport.abort()
            return
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = True
        for frame in self._reader.feed(data):
            if frame["op"] == "ready":
                if not self._ready.done():
                    self._ready.set_result(frame.get("info") or {})
            else:
                self._receive(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
