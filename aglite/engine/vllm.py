"""A running vLLM server as an Engine: token ids in and out, over its `/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.engine.upstream import Counter, Events, Upstream, error_words
from aglite.engine.vllm_probe import probe
from aglite.errors import EngineError
from aglite.gateway.tokenizer import TextTokenizer

PATH = "/v1/completions"

_ID = "token_id:"
"""What stands before the id where vLLM was asked to write tokens as ids."""

_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Said in every request: vLLM would take what is missing from the model's generation_config.json."""


class VllmEngine:
    """Its weights are its own: there is one policy version, whatever `resume` names (`OwnVllm` is trained).

    vLLM's log-probabilities are those of the distribution that it sampled from: where top_p, top_k, min_p or a
    grammar narrow it, after that.
    """

    gives_whole = True
    """Whether a response that nobody reads along may come in one piece."""

    def __init__(self, url: str, tokenizer: TextTokenizer, *, model: str = "", key_env: str = "") -> None:
        self.info = EngineInfo("vllm", model, 0, tokenizer.vocab_size, constrains=True)
        self._tokenizer = tokenizer
        self._server = Upstream(url, "vLLM", key_env)
        self._streams: set[Events] = set()
        self._version = 0
        self._counter = Counter()
        self._going = asyncio.Event()
        self._going.set()
        self._checking = asyncio.Lock()

    async def start(self) -> None:
        """Ask what it serves and try it out. Raises EngineError for a server whose tokens cannot be relied on."""
        await self.connect()
        await probe(self, self._tokenizer)

    async def connect(self) -> None:
        """Take model name and context length from the server."""
        served = (await self._server.get("/v1/models")).get("data") or []
        names = [model.get("id") for model in served]
        wanted = self.info.model or (names[0] if names else "")
        if wanted not in names:
            raise EngineError(
                f"{self._server.where} serves {', '.join(map(str, names)) or 'no model'}, not {wanted!r}",
                "put the name that it serves into engine.model",
            )
        length = served[names.index(wanted)].get("max_model_len")
        if not isinstance(length, int):
            raise EngineError(
                f"{self._server.where} does not say how long its context is (max_model_len in /v1/models)",
                "engine.kind vllm needs a vLLM server, 0.10.2 or newer; another one may work as kind: api",
            )
        self.info.model, self.info.context_length = wanted, length
        self._server.lost = False

    async def stop(self) -> None:
        await self._server.close()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Chunk]:
        """Sample one response. Raises EngineError, RequestRefused or EngineBusy in the server's own words."""
        if self._server.lost:
            await self._check_again()
        self._counter.running += 1
        last: Chunk | None = None
        try:
            if params.whole and self.gives_whole:
                body = orjson.dumps(self._body(prompt_ids, params, stream=False))
                last = self._chunk([await self._server.post(PATH, body)], params.top_logprobs, self._version)
                self._counter.sampled += len(last.token_ids)
            else:
                async with self.ask(prompt_ids, params) as events:
                    async for batch in events:
                        chunk = self._chunk(batch, params.top_logprobs, events.mark)
                        self._counter.sampled += len(chunk.token_ids)
                        if chunk.finish_reason is not None:
                            last = chunk  # kept until the stream has ended: then its connection can be used again
                        elif chunk.token_ids:
                            await self._going.wait()
                            yield chunk
        finally:
            self._counter.running -= 1
        if last is None:
            raise EngineError(f"{self._server.where} ended a response without a reason", "see its log")
        await self._going.wait()
        yield last

    @contextlib.asynccontextmanager
    async def ask(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Events]:
        """The events of one response as vLLM sends them, marked with the policy version."""
        body = orjson.dumps(self._body(prompt_ids, params, stream=True))
        events = self._server.events(PATH, body, self._version)
        self._streams.add(events)
        try:
            async with events:
                yield events
        finally:
            self._streams.discard(events)

    def _body(self, prompt_ids: Sequence[int], params: SamplingParams, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.info.model,
            "prompt": list(prompt_ids),
            "stream": stream,
            "return_token_ids": True,
            "logprobs": params.top_logprobs,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": params.stop_token_ids,
            "skip_special_tokens": False,
            **_NEUTRAL,
        }
        if params.top_logprobs:
            body["return_tokens_as_token_ids"] = True
        if params.seed is not None:
            body["seed"] = params.seed
        if params.grammar is not None:
            body["structured_outputs"] = {"structural_tag": params.grammar}
        return body

    async def preempt(self) -> None:
        """Nothing more is given out until `resume`; what vLLM samples meanwhile waits here."""
        self._going.clear()

    async def resume(self, version: int) -> None:
        self._version = version
        self._going.set()

    async def stats(self) -> EngineStats:
        return self._counter.stats()

    async def _check_again(self) -> None:
        """It was away: what came back may be another server."""
        async with self._checking:
            if self._server.lost:
                await self.connect()
                try:
                    await probe(self, self._tokenizer)
                except EngineError:
                    self._server.lost = True
                    raise

    def _chunk(self, batch: list[bytes], most: int, version: int) -> Chunk:
        """All that arrived together; of the most probable tokens, `most` a place."""
        chunk = Chunk([], [], version, None, [] if most else None)
        events = [_without_prompt(data) for data in batch if data != b"[DONE]"]
        try:
            found = orjson.loads(b"[%b]" % b",".join(events))  # one call of the parser for all
        except orjson.JSONDecodeError:
            said = b" ".join(batch)[:200]
            mend = "see its log, and that of a proxy where one stands between"
            raise EngineError(f"{self._server.where} sent what is no JSON: {said!r}", mend) from None
        for event in found:
            if "error" in event:
                raise EngineError(f"vLLM: {error_words(orjson.dumps(event))[0]}", "see its log")
            for choice in event["choices"]:
                self._take(choice, chunk, most)
        return chunk

    def _take(self, choice: dict[str, Any], chunk: Chunk, most: int) -> None:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs") or []
        if ids is None or len(ids) != len(values):
            raise EngineError(
                f"{self._server.where} sent token ids {ids} with log-probabilities {values}",
                "use vLLM 0.10.2 or newer",
            )
        chunk.token_ids += ids
        chunk.logprobs += values
        if chunk.top is not None:
            chunk.top += [_ranked(one)[:most] for one in logprobs.get("top_logprobs") or []]
        reason = choice.get("finish_reason")
        if reason in ("stop", "length"):
            chunk.finish_reason = reason
        elif reason is not None:
            raise EngineError(f"{self._server.where} broke off a response ({reason})", "see its log")


def _without_prompt(data: bytes) -> bytes:
    """An event without the echo of the prompt's ids, of which nothing is wanted and which takes longest to read."""
    start = data.find(b'"prompt_token_ids":[')
    if start < 0:
        return data
    return data[:start] + b'"prompt_token_ids":null' + data[data.index(b"]", start) + 1 :]


def _ranked(top: dict[str, float]) -> list[tuple[int, float]]:
    pairs = [(int(token.removeprefix(_ID)), logprob) for token, logprob in top.items()]
    return sorted(pairs, key=lambda pair: -pair[1])
