"""An engine without a model, for tests: given or made-up replies, exact tokens, the worker's protocol, no torch.

    python -m aglite.engine.scripted --socket PATH [--script FILE]

A script is JSON; all of it is optional:

    {"replies": [{"match": "regex over the prompt's text", "text": "...", "ids": [..], "logprobs": [..],
                  "texts": ["first time", "second time", ...], "finish": "stop" | "length", "error": "...",
                  "grammar_error": "..."}],     what is said of the grammar of a constrained request
     "constrains": false,       whether it takes grammars; the replies must obey them on their own
     "latency_s": 0.0,          seconds a token
     "tokens_per_chunk": 1,
     "prefill_s": 0.0,          seconds before the first token
     "length": 12,              tokens of a made-up reply, which depends on the prompt and the seed alone
     "train_s": 0.0,            seconds of a training step
     "train_waits": {"2": "FILE"},   the second training step of this process ends only when FILE is there
     "train": [{...}, ...],     what each training step reports instead, the last entry for all further ones
     "record": "FILE",          a file to which the name of each call is appended
     "memory_full": false}      whether weights can be exported into /dev/shm

The first reply whose `match` is found (or that has none) answers. The log-probability of a token is a function of the
token and its position, so that what `logprobs` recomputes equals what was sampled. A worker that only trains (init
without an engine) has weights that each step changes: see `trained_logprob`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

from aglite.engine.scripted_engine import ScriptedEngine, logprob_of
from aglite.errors import AgliteError, DiskFullError, EngineError
from aglite.gateway.tokenizer import TextTokenizer, read_json
from aglite.paths import MEMORY
from aglite.worker.io import (
    FrameReader,
    encode,
    error_frame,
    failed_frame,
    pack_floats,
    params_of,
    tokens_item,
    unpack_floats,
    unpack_ids,
)


class ScriptedWorker:
    """The model worker's side of the protocol around a ScriptedEngine. Training is answered, not done."""

    def __init__(self, script: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._script = script
        self._writer = writer
        self._engine = ScriptedEngine(None, script)
        self._model = Path()
        self._only_trains = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self._steps = 0
        self._updates = 0
        self._sent = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the socket closes."""
        self._send({"op": "ready", "info": {"kind": "scripted", "pid": os.getpid()}})
        beat = asyncio.create_task(self._heartbeat())
        frames = FrameReader()
        calls: set[asyncio.Task[None]] = set()
        while data := await reader.read(1 << 20):
            for frame in frames.feed(data):
                if frame["op"] == "generate":
                    self._running[frame["id"]] = asyncio.create_task(self._generate(frame))
                elif frame["op"] == "cancel":
                    if (task := self._running.pop(frame["id"], None)) is not None:
                        task.cancel()
                elif frame["op"] == "call":
                    calls.add(task := asyncio.create_task(self._call(frame)))
                    task.add_done_callback(calls.discard)
        beat.cancel()

    def _send(self, frame: dict[str, Any]) -> None:
        self._writer.write(encode(frame))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._send({"op": "heartbeat"})

    async def _generate(self, frame: dict[str, Any]) -> None:
        number = frame["id"]
        try:
            async for chunk in self._engine.generate(unpack_ids(frame["prompt"]), params_of(frame)):
                self._send({"op": "tokens", "items": [tokens_item(number, chunk)]})
        except AgliteError as error:
            self._send(failed_frame(number, error))
        finally:
            self._running.pop(number, None)

    async def _call(self, frame: dict[str, Any]) -> None:
        method = getattr(self, f"_do_{frame['method']}", None)
        self._record(frame["method"])
        try:
            if method is None:
                raise EngineError(f"the scripted worker has no method {frame['method']!r}")
            value = await method(**frame["args"])
        except Exception as error:  # the caller must hear of it, whatever it was
            if not isinstance(error, AgliteError):
                traceback.print_exc()
            self._send(error_frame(frame["id"], error))
        else:
            self._send({"op": "result", "id": frame["id"], "value": value})

    def _record(self, method: str) -> None:
        if record := self._script.get("record"):
            with open(record, "a") as file:
                file.write(f"trainer {method}\n")

    async def _do_init(
        self, model: str, engine: dict[str, Any] | None, trainer: dict[str, Any] | None = None, seed: int = 0, **_: Any
    ) -> dict[str, Any] | None:
        self._model = Path(model)
        if not (self._model / "config.json").is_file():
            raise EngineError(f"no model in {model}: config.json is missing", "give a Hugging Face model folder")
        self._send({"op": "event", "kind": "loading", "data": {"stage": "done"}})
        self._only_trains = engine is None
        if engine is None:
            return None
        size = read_json(self._model / "config.json").get("vocab_size", 0)
        self._engine = ScriptedEngine(
            TextTokenizer(self._model),
            self._script,
            context_length=engine.get("context_length") or 4096,
            vocab_size=size,
        )
        self._engine.info.model = model
        return dataclasses.asdict(self._engine.info)

    async def _do_preempt(self) -> None:
        await self._engine.preempt()

    async def _do_resume(self, version: int) -> None:
        await self._engine.resume(version)

    async def _do_stats(self) -> dict[str, Any]:
        return dataclasses.asdict(await self._engine.stats())

    async def _do_logprobs(self, rows: list[bytes], temperature: float, source: str = "engine") -> list[bytes]:
        ids = [unpack_ids(row) for row in rows]
        if self._only_trains:
            return [
                pack_floats([trained_logprob(token, at, self._updates) for at, token in enumerate(row) if at])
                for row in ids
            ]
        return [pack_floats(values) for values in self._engine.logprobs(ids)]

    async def _do_onload(self) -> None: ...

    async def _do_offload(self) -> None: ...

    async def _do_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Metrics of a step that was applied; the gap is between recorded and recomputed log-probabilities."""
        began = time.monotonic()
        await self._engine.preempt()
        if (file := self._script.get("train_waits", {}).get(str(self._steps + 1))) is not None:
            while not os.path.exists(file):  # noqa: ASYNC110 (a file has no event)
                await asyncio.sleep(0.02)
        micro_batches = [micro for mini in batch["plan"] for micro in mini]
        for done in range(len(micro_batches)):
            await asyncio.sleep(self._script.get("train_s", 0.0) / len(micro_batches))
            self._send(
                {"op": "event", "kind": "train", "data": {"done": done + 1, "of": len(micro_batches), "stage": "step"}}
            )
        gaps, tokens, trained = [], 0, 0
        for row in batch["rows"]:
            ids, recorded = unpack_ids(row["ids"]), unpack_floats(row["logprobs"])
            tokens += len(ids)
            trained += sum(row["mask"])
            free = bytes(1 - on for on in row.get("constrained") or bytes(len(ids)))
            compared = (at for at, on in enumerate(row["mask"]) if on and free[at])
            gaps += [abs(logprob_of(ids[at], at) - recorded[at]) for at in compared]
        script = self._script.get("train") or [{}]
        told = script[min(self._steps, len(script) - 1)]
        self._steps += 1
        if told.get("applied", True):
            self._updates += len(batch["plan"])
        return {
            "loss": 0.0,
            "grad_norm": 1.0,
            "entropy": 1.0,
            "kl_rollout": 0.0,
            "logprob_gap_mean": sum(gaps) / len(gaps) if gaps else 0.0,
            "logprob_gap_max": max(gaps, default=0.0),
            "clip_fraction": 0.0,
            "correction_capped": 0.0,
            "tokens": tokens,
            "trained_tokens": trained,
            "seconds": time.monotonic() - began,
            "applied": True,
            "updates": len(batch["plan"]),
            **told,
        }

    async def _do_save(self, path: str, meta: dict[str, Any]) -> None:
        """A checkpoint folder of the right shape: the model's files, the trainer's (a count), the meta."""
        target = Path(path)
        partial = target.with_name(target.name + ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self._copy_model(partial)
            (partial / "trainer").mkdir(exist_ok=True)
            (partial / "trainer" / "updates.json").write_text(json.dumps(self._updates))
            (partial / "aglite.json").write_text(json.dumps(meta))
        except OSError as error:  # shutil's own among them, which has no errno
            shutil.rmtree(partial, ignore_errors=True)
            if "No space left" in str(error):
                raise DiskFullError(f"{target.name} could not be written: {error}", "free some disk space") from None
            raise
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    async def _do_load(self, path: str) -> dict[str, Any]:
        await self._engine.preempt()
        try:
            meta = json.loads((Path(path) / "aglite.json").read_text())
            self._updates = json.loads((Path(path) / "trainer" / "updates.json").read_text())
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} is no checkpoint: {error}") from error
        return meta

    async def _do_send_weights(self, dtype: str, begin: bool) -> dict[str, Any] | None:
        """Two parcels without content."""
        self._sent = 0 if begin else self._sent + 1
        parcel = {"names": [f"weight-{self._sent}"], "dtype_names": [dtype], "updates": self._updates}
        return parcel if self._sent < 2 else None

    async def _do_export(self, path: str, dtype: str = "") -> None:
        if self._script.get("memory_full") and Path(path).is_relative_to(MEMORY):
            raise DiskFullError("there is no room in memory")
        self._copy_model(Path(path))
        (Path(path) / "updates.json").write_text(json.dumps(self._updates))

    def _copy_model(self, target: Path) -> None:
        target.mkdir(parents=True)
        for file in self._model.iterdir():
            if file.is_file() and file.name != "aglite.json":
                shutil.copyfile(file, target / file.name)


def trained_logprob(token: int, position: int, updates: int) -> float:
    """Made up, and moved by every update."""
    return logprob_of(token, position) - updates / 64


async def _run(socket: str, script: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_unix_connection(socket)
    await ScriptedWorker(script, writer).serve(reader)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aglite.engine.scripted", description="a worker without a model")
    parser.add_argument("--socket", required=True, help="Unix socket that the supervisor listens on")
    parser.add_argument("--script", default=os.environ.get("AGLITE_SCRIPT"), help="JSON of replies and timings")
    arguments = parser.parse_args()
    script = json.loads(Path(arguments.script).read_text()) if arguments.script else {}
    asyncio.run(_run(arguments.socket, script))


if __name__ == "__main__":
    main()
