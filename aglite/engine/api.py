"""A model behind somebody's Chat Completions endpoint: text in, text out, no tokens, and so never trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from aglite.engine.base import EngineInfo, EngineStats, RequestRefused, SamplingParams
from aglite.engine.upstream import Counter, Upstream, error_words
from aglite.errors import EngineError
from aglite.gateway.dialects.base import FinishReason, Request, TokenInfo
from aglite.gateway.replies import Piece, Reasoning, Text, ToolArguments, ToolStart, new_call_id

UNLIMITED = 2**30
"""A token limit from here on is none, and not passed on."""

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "stop",
}


@dataclass(slots=True)
class TextChunk:
    """What the reply has grown by. `usage` (prompt and completion tokens, as the endpoint counts them) comes once."""

    pieces: list[Piece] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: tuple[int, int] | None = None


class ApiEngine:
    """One model of an OpenAI-compatible endpoint. The key is read from the environment and kept in memory only."""

    def __init__(self, url: str, model: str, *, key_env: str = "") -> None:
        self.info = EngineInfo("api", model, 0, 0, constrains=True)
        self._server = Upstream(url, model, key_env, proxied=True)
        self._counter = Counter()
        self._limit_name = "max_tokens"

    async def start(self) -> None:
        """Nothing is asked: endpoints differ in what they answer besides chat, and a call may cost money."""

    async def stop(self) -> None:
        await self._server.close()

    async def stats(self) -> EngineStats:
        return self._counter.stats()

    async def chat(self, request: Request, params: SamplingParams) -> AsyncIterator[TextChunk]:
        """The reply to one request. Raises EngineError, RequestRefused or EngineBusy in the endpoint's own words."""
        self._counter.running += 1
        name = self._limit_name
        try:
            try:
                async for chunk in self._reply(request, params):
                    yield chunk
            except RequestRefused as error:  # newer models of OpenAI's know the limit by another name
                if error.param != "max_tokens" or name != "max_tokens":
                    raise
                self._limit_name = "max_completion_tokens"
                async for chunk in self._reply(request, params):
                    yield chunk
        finally:
            self._counter.running -= 1

    async def _reply(self, request: Request, params: SamplingParams) -> AsyncIterator[TextChunk]:
        reader = _Reader(self.info.model)
        events = self._server.events("/v1/chat/completions", orjson.dumps(self._body(request, params)))
        async with events:
            async for batch in events:
                chunk = reader.read(batch)
                if chunk.usage is not None:
                    self._counter.sampled += chunk.usage[1]
                yield chunk
        yield reader.end()

    def _body(self, request: Request, params: SamplingParams) -> dict[str, Any]:
        """What equals the protocol's default is left out: endpoints refuse what their model does not have."""
        body: dict[str, Any] = {
            "model": self.info.model,
            "messages": request.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.max_tokens < UNLIMITED:
            body[self._limit_name] = params.max_tokens
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("seed", None)):
            if getattr(params, name) != default:
                body[name] = getattr(params, name)
        if request.stops:
            body["stop"] = list(request.stops)
        if request.logprobs:
            body["logprobs"] = True
            if request.top_logprobs:
                body["top_logprobs"] = request.top_logprobs
        if request.tools:
            body["tools"] = request.tools
            if not request.calls_tools:
                body["tool_choice"] = "none"
            elif request.must_call:
                body["tool_choice"] = _choice(request.must_call, request.tools)
            if request.one_call:
                body["parallel_tool_calls"] = False
        if request.schema == {"type": "object"}:
            body["response_format"] = {"type": "json_object"}
        elif request.schema is not None:
            schema = {"name": "reply", "schema": request.schema, "strict": request.schema_strict}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


def _choice(names: Sequence[str], tools: Sequence[dict[str, Any]]) -> Any:
    if len(names) == 1 and len(tools) > 1:
        return {"type": "function", "function": {"name": names[0]}}
    return "required"


class _Reader:
    """From the endpoint's events to pieces."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: dict[int, int] = {}
        self._reason: FinishReason | None = None

    def read(self, batch: list[bytes]) -> TextChunk:
        chunk = TextChunk()
        for data in batch:
            if data == b"[DONE]":
                continue
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                raise EngineError(f"{self._what}: an event is not JSON: {data[:200]!r}", "check engine.url") from None
            if event.get("error"):
                raise EngineError(f"{self._what}: {error_words(data)[0]}")
            if usage := event.get("usage"):
                chunk.usage = (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
            for choice in event.get("choices") or ():
                self._choice(choice, chunk)
        return chunk

    def end(self) -> TextChunk:
        if self._reason is None:
            raise EngineError(f"{self._what}: the reply ended without a reason")
        return TextChunk(finish_reason=self._reason)

    def _choice(self, choice: dict[str, Any], chunk: TextChunk) -> None:
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            chunk.pieces.append(Reasoning(thought))
        if text := delta.get("content") or delta.get("refusal"):
            chunk.pieces.append(Text(text))
        for call in delta.get("tool_calls") or ():
            self._tool(call, chunk)
        for token in (choice.get("logprobs") or {}).get("content") or ():
            chunk.infos.append(_info(token, [_info(top) for top in token.get("top_logprobs") or ()]))
        if reason := choice.get("finish_reason"):
            self._reason = _REASONS.get(reason, "stop")

    def _tool(self, call: dict[str, Any], chunk: TextChunk) -> None:
        """The endpoint's numbers may have gaps; ours count up."""
        function, number = call.get("function") or {}, call.get("index", len(self._calls))
        if number not in self._calls:
            self._calls[number] = len(self._calls)
            started = ToolStart(self._calls[number], call.get("id") or new_call_id(), function.get("name") or "")
            chunk.pieces.append(started)
        if arguments := function.get("arguments"):
            chunk.pieces.append(ToolArguments(self._calls[number], arguments))


def _info(token: dict[str, Any], top: Sequence[TokenInfo] = ()) -> TokenInfo:
    text = token.get("token") or ""
    data = token.get("bytes")
    return TokenInfo(text, text.encode() if data is None else bytes(data), token.get("logprob") or 0.0, top)
