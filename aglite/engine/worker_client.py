"""The supervisor's side of a model worker: starts the process, speaks its protocol, notices its death."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.engine.child import HEARTBEAT_TIMEOUT_S, Child, ChildExit
from aglite.errors import AgliteError, DiskFullError, EngineError, GrammarError
from aglite.paths import near_tmp
from aglite.worker.io import FrameReader, chunk_of, encode, pack_ids, unpack_floats

_ERRORS = {kind.__name__: kind for kind in (AgliteError, DiskFullError, EngineError)}


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
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self.info = EngineInfo(kind="", model="", context_length=0, vocab_size=0)
        self.on_event = on_event
        self.silent_s = 0
        """How long the process has given no sign of life; it gives one each second, whatever it computes."""
        self._child = Child(name, log_path)
        self._command = list(command)
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._numbers = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Chunk | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._socket: _Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # process

    tolerance = 1e-3
    """Nats by which log-probabilities of engine and trainer may differ on average under the same weights."""
    sleeps = False
    stalled = ""
    """It gives a sign of life each second or is ended: there is no such thing as answering and doing nothing."""
    """Whether engine and trainer take turns on the device: see `aglite.engine.collocated`."""

    @property
    def holders(self) -> dict[int, str]:
        """Which processes may hold memory of a GPU, by id."""
        return {self.pid: self.name} if self.pid else {}

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def exited(self) -> asyncio.Future[ChildExit]:
        return self._child.exited

    async def start(self) -> None:
        """Start the process and wait until it has connected. Raises EngineError with its last lines if it does not."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        folder = Path(tempfile.mkdtemp(prefix="aglite-worker-", dir=near_tmp(len("/aglite-worker-12345678/socket"))))
        self._socket = _Socket(self._receive, ready, self._garbled)
        server = await loop.create_unix_server(lambda: self._socket, path=str(folder / "socket"))
        try:
            await self._child.start([*self._command, "--socket", str(folder / "socket")], self._env)
            self.exited.add_done_callback(self._ended)
            await asyncio.wait({ready, self.exited}, timeout=self._start_timeout_s, return_when="FIRST_COMPLETED")
            if not ready.done():
                await self._child.kill(f"the {self.name} did not connect within {self._start_timeout_s:g} s")
                raise (await self.exited).error()
            self._take_info(ready.result())
            self._tasks.append(asyncio.create_task(self._watch_heartbeat()))
        finally:
            server.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the process: close its socket, then SIGKILL its whole process group. Safe to call twice."""
        if self.pid is None or self._child.stopping:
            return
        self._child.stopping = True
        if self._socket is not None:
            self._socket.close()
        await self._child.wait(timeout_s)

    def _ended(self, exited: asyncio.Future[ChildExit]) -> None:
        """Whoever waits for something from it waits no longer."""
        exit = exited.result()
        error = exit.error() if not exit.stopped else EngineError(f"the {self.name} was stopped")
        for queue in self._streams.values():
            queue.put_nowait(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        if self._socket is not None:
            self._socket.close()

    async def _watch_heartbeat(self) -> None:
        """Counts its own ticks, not the clock: a supervisor that was suspended must not blame the worker."""
        while not self.exited.done():
            assert self._socket is not None
            self._socket.heard = False
            await asyncio.sleep(1)
            self.silent_s = 0 if self._socket.heard else self.silent_s + 1
            if self._socket.closed and self.silent_s >= 5:  # normally the process ends with its socket
                await self._child.kill(f"the {self.name} closed its socket without ending")
            elif self.silent_s >= self._heartbeat_timeout_s:
                await self._child.kill(f"the {self.name} gave no sign of life for {self._heartbeat_timeout_s:g} s")

    # frames

    def _garbled(self, error: EngineError) -> None:
        """Nothing that it sends from now on can be understood."""
        reason = f"the {self.name} speaks another protocol: {error.message}"
        self._tasks.append(asyncio.create_task(self._child.kill(reason)))

    def _receive(self, frame: dict[str, Any]) -> None:
        op = frame["op"]
        if op == "tokens":
            for item in frame["items"]:
                queue = self._streams.get(item[0])
                if queue is not None:
                    queue.put_nowait(chunk_of(item))
        elif op == "failed":
            queue = self._streams.get(frame["id"])
            if queue is not None:
                kind = GrammarError if frame["type"] == "GrammarError" else EngineError
                queue.put_nowait(kind(frame["error"], frame["mend"]))
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
            raise EngineError(f"the {self.name} has not been started")
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
        self,
        model: Path | str,
        *,
        engine: dict[str, Any] | None,
        trainer: dict[str, Any] | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> EngineInfo:
        """Load a model folder. `engine`: context_length, max_running, kv_tokens, threads; None for a worker that only
        trains. `trainer`: lr, betas, weight_decay, grad_clip, kl; None loads no trainer (and is much quicker)."""
        more = {"threads": threads} if threads else {}
        self._take_info(await self._call("init", model=str(model), engine=engine, trainer=trainer, seed=seed, **more))
        return self.info

    async def sleep(self) -> None:
        """Nothing: what samples and what trains are one."""

    # a worker that only trains shares its device with another process's engine

    async def onload(self) -> None:
        """Bring what training needs to the device."""
        await self._call("onload")

    async def offload(self) -> None:
        """Leave the device to the engine."""
        await self._call("offload")

    async def parcels(self, dtype: str) -> AsyncIterator[dict[str, Any]]:
        """The weights in GPU memory, see `aglite.worker.parcels`. Each parcel is there until the next is asked for."""
        begin = True
        while (parcel := await self._call("send_weights", dtype=dtype, begin=begin)) is not None:
            begin = False
            yield parcel

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
        """Write a checkpoint folder, whole or not at all. Raises DiskFullError when there is no room for it."""
        await self._call("save", path=str(path), meta=meta)

    async def load(self, path: Path | str) -> dict[str, Any]:
        """Go back to a checkpoint: weights, optimizer, random state. Returns its meta; `resume` names the version."""
        return await self._call("load", path=str(path))

    async def export(self, path: Path | str, dtype: str = "") -> None:
        """Write the weights as a Hugging Face folder, as they are or as another `dtype`. Raises DiskFullError."""
        await self._call("export", path=str(path), **({"dtype": dtype} if dtype else {}))


class _Socket(asyncio.Protocol):
    """The supervisor's end of the one connection that a worker makes."""

    def __init__(
        self,
        receive: Callable[[dict[str, Any]], None],
        ready: asyncio.Future[dict[str, Any]],
        garbled: Callable[[EngineError], None],
    ) -> None:
        self.heard = False
        self.closed = False
        self._receive = receive
        self._ready = ready
        self._garbled = garbled
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is no subclass
        if self._transport is not None:
            transport.abort()
            return
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            frames = self._reader.feed(data)
        except EngineError as error:
            assert self._transport is not None
            self._transport.pause_reading()  # type: ignore[attr-defined]
            self._garbled(error)
            return
        for frame in frames:
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
