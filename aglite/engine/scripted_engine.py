"""The scripted engine itself: see `aglite.engine.scripted` for what a script says."""

from __future__ import annotations

import asyncio
import random
import re
import struct
import zlib
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.errors import EngineError, GrammarError
from aglite.gateway.tokenizer import TextTokenizer


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
        constrains = bool(self.script.get("constrains", False))
        self.info = EngineInfo("scripted", "scripted", context_length, size, constrains=constrains)
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
                if params.top_logprobs:
                    chunk.top = [
                        self._top(token, logprob, len(prompt) + place, params.top_logprobs)
                        for place, (token, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True), at)
                    ]
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
        if params.grammar is not None and ("grammar_error" in given or not self.info.constrains):
            raise GrammarError(given.get("grammar_error", "this engine does not constrain"))
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

    def _top(self, token: int, logprob: float, position: int, count: int) -> list[tuple[int, float]]:
        """The sampled token and its neighbours, best first."""
        others = ((token + 1 + step) % self.info.vocab_size for step in range(count))
        pairs = [(token, logprob), *((other, logprob_of(other, position)) for other in others)]
        return sorted(pairs, key=lambda pair: -pair[1])[:count]

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
