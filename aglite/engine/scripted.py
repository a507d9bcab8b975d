"""An engine without a model, for tests: given or made-up replies, exact tokens, the worker's protocol, no torch.

    python -m aglite.engine.scripted --socket PATH [--script FILE]

A script is JSON; all of it is optional:

    {"replies": [{"match": "regex over the prompt's text", "text": "...", "ids": [..], "logprobs": [..],
                  "texts": ["first time", "second time", ...], "finish": "stop" | "length", "error": "..."}],
     "latency_s": 0.0,          seconds a token
     "tokens_per_chunk": 1,
     "prefill_s": 0.0,          seconds before the first token
     "length": 12,              tokens of a made-up reply, which depends on the prompt and the seed alone
     "train_s": 0.0}            seconds of a training step

The first reply whose `match` is found (or that has none) answers. The log-probability of a token is a function of the
token and its position, so that what `logprobs` recomputes equals what was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import shutil
import struct
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.errors import AgliteError, EngineError
from aglite.gateway.tokenizer import TextTokenizer, read_json
from aglite.worker.io import FrameReader, encode, pack_floats, pack_ids, unpack_floats, unpack_ids


class ScriptedEngine:
    """The engine contract, in the process. `sent` keeps every response: (prompt, ids, logprobs, versions)."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None = None,
        script: dict[str, Any] | None = None,
        *,
        context_length: int = 4096,
        vocab_size: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script or {}
        size = vocab_size or (tokenizer.vocab_size if tokenizer else 1000)
        self.info = EngineInfo("scripted", "scripted", context_length, size)
        self.version = 0
        self.sent: list[tuple[list[int], list[int], list[float], list[int]]] = []
        self.requests: list[SamplingParams] = []
        self.cancelled = 0
        self.running = 0
        self.failure: str | None = None
        """Set: every generation fails with it."""
        self._sampled = 0
        self._going = asyncio.Event()
        self._going.set()
        self._used: dict[int, int] = {}

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Chunk]:
        prompt = list(prompt_ids)
        ids, logprobs, finish = self._reply(prompt, params)
        row: tuple[list[int], list[int], list[float], list[int]] = (prompt, [], [], [])
        self.sent.append(row)
        self.requests.append(params)
        step = max(1, self.script.get("tokens_per_chunk", 1))
        latency = self.script.get("latency_s", 0.0)
        ended = False
        self.running += 1
        try:
            await self._pause(self.script.get("prefill_s", 0.0))
            for at in range(0, len(ids), step):
                await self._pause(latency * len(ids[at : at + step]))
                if self.failure:
                    raise EngineError(self.failure)
                chunk = Chunk(ids[at : at + step], logprobs[at : at + step], self.version)
                if at + step >= len(ids):
                    chunk.finish_reason = finish
                    ended = True
                row[1].extend(chunk.token_ids)
                row[2].extend(chunk.logprobs)
                row[3].extend([self.version] * len(chunk.token_ids))
                self._sampled += len(chunk.token_ids)
                yield chunk
        finally:
            self.running -= 1
            self.cancelled += not ended

    async def preempt(self) -> None:
        self._going.clear()

    async def resume(self, version: int) -> None:
        self.version = version
        self._going.set()

    async def stats(self) -> EngineStats:
        return EngineStats(running=self.running, sampled_tokens=self._sampled)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token but the first of each row."""
        return [[logprob_of(token, at) for at, token in enumerate(row) if at] for row in rows]

    async def _pause(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        await self._going.wait()

    def _reply(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float], Any]:
        if self.failure:
            raise EngineError(self.failure)
        if len(prompt) >= self.info.context_length:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens does not fit the context of {self.info.context_length} tokens"
            )
        given: dict[str, Any] = self._given(prompt) or {}
        if "error" in given:
            raise EngineError(given["error"])
        stop = params.stop_token_ids[0] if params.stop_token_ids else None
        finish = given.get("finish", "stop")
        if "ids" in given:
            ids = list(given["ids"])
        elif "text" in given:
            if self.tokenizer is None:
                raise EngineError("a script with texts needs a tokenizer", "init it with a model folder")
            ids = self.tokenizer.encode(given["text"])
            if finish == "stop" and stop is not None:
                ids.append(stop)
        else:
            ids = self._made_up(prompt, params, stop)
        if len(ids) > params.max_tokens:
            ids, finish = ids[: params.max_tokens], "length"
        room = self.info.context_length - len(prompt)
        if len(ids) > room:
            ids, finish = ids[:room], "length"
        logprobs = list(given.get("logprobs", ()))[: len(ids)]
        logprobs += [logprob_of(token, len(prompt) + at) for at, token in enumerate(ids)][len(logprobs) :]
        return ids, logprobs, finish

    def _given(self, prompt: list[int]) -> dict[str, Any] | None:
        text = self.tokenizer.decode(prompt) if self.tokenizer else ""
        for index, reply in enumerate(self.script.get("replies", ())):
            if "match" in reply and not re.search(reply["match"], text, re.DOTALL):
                continue
            if "texts" in reply:
                used = self._used.get(index, 0)
                if used >= len(reply["texts"]):
                    continue
                self._used[index] = used + 1
                return {**reply, "text": reply["texts"][used]}
            return reply
        return None

    def _made_up(self, prompt: list[int], params: SamplingParams, stop: int | None) -> list[int]:
        seed = zlib.crc32(array("i", prompt).tobytes()) if params.seed is None else params.seed
        rng = random.Random(seed)
        low, high = min(256, self.info.vocab_size // 2), self.info.vocab_size - 1
        ids = [rng.randint(low, high) for _ in range(self.script.get("length", 12))]
        return [*ids, stop] if stop is not None else ids


def logprob_of(token: int, position: int) -> float:
    """Made up, exact in float32, the same whenever it is asked for."""
    value = -((token * 2654435761 + position * 40503) % 4096 + 1) / 2048
    return struct.unpack("f", struct.pack("f", value))[0]


class ScriptedWorker:
    """The model worker's side of the protocol around a ScriptedEngine. Training is answered, not done."""

    def __init__(self, script: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._script = script
        self._writer = writer
        self._engine = ScriptedEngine(None, script)
        self._model = Path()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._updates = 0

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
        params = dict(frame["params"])
        params["stop_token_ids"] = tuple(params.get("stop_token_ids") or ())
        try:
            async for chunk in self._engine.generate(unpack_ids(frame["prompt"]), SamplingParams(**params)):
                ids, logprobs = pack_ids(chunk.token_ids), pack_floats(chunk.logprobs)
                self._send({"op": "tokens", "items": [[number, ids, logprobs, chunk.version, chunk.finish_reason]]})
        except AgliteError as error:
            self._send({"op": "failed", "id": number, "error": error.message, "mend": error.mend})
        finally:
            self._running.pop(number, None)

    async def _call(self, frame: dict[str, Any]) -> None:
        method = getattr(self, f"_do_{frame['method']}", None)
        try:
            if method is None:
                raise EngineError(f"the scripted worker has no method {frame['method']!r}")
            value = await method(**frame["args"])
        except Exception as error:  # the caller must hear of it, whatever it was
            message, mend = (
                (error.message, error.mend)
                if isinstance(error, AgliteError)
                else (f"{type(error).__name__}: {error}", "")
            )
            kind = type(error).__name__
            problem = {"type": kind, "message": message, "mend": mend, "traceback": ""}
            self._send({"op": "error", "id": frame["id"], **problem})
        else:
            self._send({"op": "result", "id": frame["id"], "value": value})

    async def _do_init(
        self, model: str, engine: dict[str, Any], trainer: dict[str, Any] | None = None, seed: int = 0
    ) -> dict[str, Any]:
        self._model = Path(model)
        if not (self._model / "config.json").is_file():
            raise EngineError(f"no model in {model}: config.json is missing", "give a Hugging Face model folder")
        self._send({"op": "event", "kind": "loading", "data": {"stage": "done"}})
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
        return [pack_floats(values) for values in self._engine.logprobs([unpack_ids(row) for row in rows])]

    async def _do_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Metrics of a step that was applied; the gap is between recorded and recomputed log-probabilities."""
        began = time.monotonic()
        await self._engine.preempt()
        micro_batches = [micro for mini in batch["plan"] for micro in mini]
        for done in range(len(micro_batches)):
            await asyncio.sleep(self._script.get("train_s", 0.0) / len(micro_batches))
            self._send(
                {"op": "event", "kind": "train", "data": {"done": done + 1, "of": len(micro_batches), "stage": "step"}}
            )
        gaps, tokens = [], 0
        for row in batch["rows"]:
            ids, recorded = unpack_ids(row["ids"]), unpack_floats(row["logprobs"])
            tokens += len(ids)
            gaps += [abs(logprob_of(ids[at], at) - recorded[at]) for at, on in enumerate(row["mask"]) if on]
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
            "trained_tokens": len(gaps),
            "seconds": time.monotonic() - began,
            "applied": True,
            "updates": len(batch["plan"]),
        }

    async def _do_save(self, path: str, meta: dict[str, Any]) -> None:
        """A checkpoint folder of the right shape: the model's files, the trainer's (a count), the meta."""
        target = Path(path)
        partial = target.with_name(target.name + ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        self._copy_model(partial)
        (partial / "trainer").mkdir(exist_ok=True)
        (partial / "trainer" / "updates.json").write_text(json.dumps(self._updates))
        (partial / "aglite.json").write_text(json.dumps(meta))
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

    async def _do_export(self, path: str) -> None:
        self._copy_model(Path(path))

    def _copy_model(self, target: Path) -> None:
        target.mkdir(parents=True)
        for file in self._model.iterdir():
            if file.is_file() and file.name != "aglite.json":
                shutil.copyfile(file, target / file.name)


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
