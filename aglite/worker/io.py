"""Frames between the supervisor and a model worker, and the worker's I/O thread.

A frame is a msgpack map with an `op`, after its length as 4 bytes, big-endian. Token ids travel as little-endian int32,
log-probabilities as float32, both packed into bytes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NoReturn

import msgpack

from aglite.arrays import pack, unpack
from aglite.engine.base import Chunk, SamplingParams
from aglite.errors import AgliteError, EngineError

MAX_FRAME = 1 << 30
"""Bytes; a longer frame means that the other side speaks something else."""

HEARTBEAT_S = 1.0

_LENGTH = struct.Struct(">I")


def encode(frame: dict[str, Any]) -> bytes:
    """The bytes of one frame, length included."""
    body = msgpack.packb(frame)
    if len(body) > MAX_FRAME:
        raise EngineError(
            f"a frame of {len(body)} bytes is too long for the worker's socket", "train fewer rows a step"
        )
    return _LENGTH.pack(len(body)) + body


def tokens_item(request_id: int, chunk: Chunk) -> list[Any]:
    """A chunk in an item of a `tokens` frame."""
    ids, logprobs = pack_ids(chunk.token_ids), pack_floats(chunk.logprobs)
    item = [request_id, ids, logprobs, chunk.version, chunk.finish_reason]
    return item if chunk.top is None else [*item, pack_top(chunk.top)]


def chunk_of(item: list[Any]) -> Chunk:
    """The chunk of an item of a `tokens` frame; the item begins with the request's id."""
    _, ids, logprobs, version, finish_reason, *top = item
    return Chunk(unpack_ids(ids), unpack_floats(logprobs), version, finish_reason, unpack_top(*top) if top else None)


def failed_frame(request_id: int, error: AgliteError) -> dict[str, Any]:
    """A generation that ends in an error."""
    return {
        "op": "failed",
        "id": request_id,
        "type": type(error).__name__,
        "error": error.message,
        "mend": error.mend,
    }


def params_of(frame: dict[str, Any]) -> SamplingParams:
    """How a `generate` frame wants to be sampled."""
    params = dict(frame["params"])
    params["stop_token_ids"] = tuple(params.get("stop_token_ids") or ())
    return SamplingParams(**params)


def error_frame(call_id: int, error: Exception) -> dict[str, Any]:
    """A call that ends in an error, whatever it is."""
    known = isinstance(error, AgliteError)
    return {
        "op": "error",
        "id": call_id,
        "type": type(error).__name__,
        "message": error.message if known else f"{type(error).__name__}: {error}",
        "mend": error.mend if known else "see the traceback in the worker's log",
    }


class FrameReader:
    """Puts frames together from the pieces that a socket delivers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames that are complete with `data`. Raises EngineError on bytes that are no frame."""
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise EngineError(f"frame of {length} bytes on the worker's socket", "see the worker's log")
            if len(buffer) - start - 4 < length:
                break
            body = memoryview(buffer)[start + 4 : start + 4 + length]
            try:
                frame = msgpack.unpackb(body, strict_map_key=False)
            except (ValueError, TypeError) as error:
                raise EngineError(f"garbled frame on the worker's socket: {error}", "see the worker's log") from None
            finally:
                body.release()
            if not isinstance(frame, dict) or "op" not in frame:
                raise EngineError("frame without an op on the worker's socket", "see the worker's log")
            frames.append(frame)
            start += 4 + length
        del buffer[:start]
        return frames


def pack_ids(ids: Iterable[int]) -> bytes:
    return pack("i", ids)


def unpack_ids(data: bytes) -> list[int]:
    return unpack("i", data).tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    return pack("f", values)


def unpack_floats(data: bytes) -> list[float]:
    return unpack("f", data).tolist()


Top = list[list[tuple[int, float]]]
"""The most probable tokens of each place, best first: (token id, log-probability)."""


def pack_top(top: Top) -> list[list[bytes]]:
    return [[pack_ids(token for token, _ in place), pack_floats(value for _, value in place)] for place in top]


def unpack_top(data: list[list[bytes]]) -> Top:
    return [list(zip(unpack_ids(ids), unpack_floats(values), strict=True)) for ids, values in data]


class Connection:
    """The worker's end of the socket.

    A thread of its own reads frames into `inbox` and sends a heartbeat each second, so that the worker counts as alive
    while the main thread computes. The compute thread sends its frames itself: one hand-over less on the way of a
    token. When the supervisor's end closes, the process exits at once, whatever it is computing.
    """

    def __init__(self, path: str) -> None:
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="worker-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, frame: dict[str, Any]) -> None:
        """Write one frame; blocks while the supervisor is behind with reading."""
        data = encode(frame)
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError:
            self._leave("the supervisor closed the socket")

    def _run(self) -> None:
        reader = FrameReader()
        beat = time.monotonic()
        while True:
            wait = beat - time.monotonic()
            if wait <= 0:
                self.send({"op": "heartbeat"})
                beat = time.monotonic() + HEARTBEAT_S
                continue
            if not select.select([self._socket], [], [], wait)[0]:
                continue
            try:
                data = self._socket.recv(1 << 20)
                frames = reader.feed(data)
            except OSError:
                data, frames = b"", []
            except EngineError as error:
                self._leave(str(error), code=1)
            if not data:
                self._leave("the supervisor closed the socket")
            for frame in frames:
                self.inbox.put(frame)

    @staticmethod
    def _leave(reason: str, code: int = 0) -> NoReturn:
        """End the process from any thread: nobody is left to compute for, and the main thread may be deep in torch."""
        print(f"worker exits: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        import psutil

        for child in psutil.Process().children(recursive=True):  # Ray's, of a trainer on several GPUs
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(code)
