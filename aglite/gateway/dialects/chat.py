"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import Choice, Outcome, Problem, Request, RequestError, TokenInfo
from aglite.gateway.dialects.chat_request import (
    read_messages,
    read_response_format,
    read_tool_choice,
    read_tools,
)
from aglite.gateway.replies import Piece, Reasoning, Text, ToolStart


class ChatDialect:
    name = "chat"

    def parse(self, body: Any) -> Request:
        body = fields.as_object(body)
        kept = fields.asked(body)
        most = fields.integer(body, "max_completion_tokens", 1)
        limit = fields.integer(body, "max_tokens", 1)
        most = limit if most is None else most
        logprobs = fields.boolean(body, "logprobs")
        top_logprobs = fields.integer(body, "top_logprobs", 0, fields.TOP_LOGPROBS) or 0
        if top_logprobs and not logprobs:
            raise RequestError("top_logprobs", "top_logprobs is allowed only with logprobs: true")
        tools, left_out = read_tools(body.get("tools"))
        choice = read_tool_choice(body.get("tool_choice"), tools)
        schema, strict = read_response_format(body.get("response_format"), kept)
        request = Request(
            messages=read_messages(body.get("messages")),
            tools=choice.tools,
            calls_tools=choice.calls_tools,
            must_call=choice.must_call,
            one_call=not fields.boolean(body, "parallel_tool_calls", default=True),
            schema=schema,
            schema_strict=strict,
            max_tokens=most,
            stops=fields.stops(body),
            n=fields.integer(body, "n", 1, 128) or 1,
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(fields.mapping(body, "stream_options"), "include_usage"),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            model=fields.string(body, "model") or "",
            asked=kept,
        )
        if left_out:
            kept["tools_left_out"] = left_out
        return request

    def writer(self, request: Request, model: str) -> ChatWriter:
        return ChatWriter(request, model)

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps(openai_error(problem))

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        return Problem(
            400,
            "context_length",
            f"This model's maximum context length is {context_length} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages.",
            param="messages",
            code="context_length_exceeded",
        )


_ERROR_TYPES = {
    "auth": "authentication_error",
    "not_found": "not_found_error",
    "limit": "permission_error",
    "held": "overloaded_error",
    "engine": "server_error",
    "store": "server_error",
    "ended": "authentication_error",
}


def openai_error(problem: Problem) -> dict[str, Any]:
    return {
        "error": {
            "message": problem.message,
            "type": _ERROR_TYPES.get(problem.kind, "invalid_request_error"),
            "param": problem.param,
            "code": problem.code,
        }
    }


class ChatWriter:
    """Body and events of one chat completion."""

    def __init__(self, request: Request, model: str) -> None:
        self._request = request
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        chunk = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b"data: " + orjson.dumps(chunk)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def open(self) -> bytes:
        return b"".join(self._event(i, {"role": "assistant", "content": ""}) for i in range(self._request.n))

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        events = []
        for piece in pieces:
            if isinstance(piece, Text):
                delta: dict[str, Any] = {"content": piece.text}
            elif isinstance(piece, Reasoning):
                delta = {"reasoning_content": piece.text}
            elif isinstance(piece, ToolStart):
                function = {"name": piece.name, "arguments": ""}
                delta = {
                    "tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]
                }
            else:
                delta = {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
            events.append(self._event(index, delta, tokens=tokens))
            tokens = ()
        if tokens:  # sampled, but nothing to show yet: their log-probabilities are not held back
            events.append(self._event(index, {}, tokens=tokens))
        return b"".join(events)

    def close(self, outcome: Outcome) -> bytes:
        events = [self._event(choice.index, {}, finish=choice.finish_reason) for choice in outcome.choices]
        if self._request.include_usage:
            events.append(self._head + b'],"usage":' + orjson.dumps(usage(outcome)) + b"}\n\n")
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def body(self, outcome: Outcome) -> bytes:
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(choice) for choice in outcome.choices],
                "usage": usage(outcome),
            }
        )

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: " + orjson.dumps(openai_error(problem)) + b"\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.text or None
            message["tool_calls"] = reply.message()["tool_calls"]
        logprobs = {"content": _logprobs(choice.tokens), "refusal": None} if self._request.logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _event(
        self, index: int, delta: dict[str, Any], *, tokens: Sequence[TokenInfo] = (), finish: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if tokens:
            choice["logprobs"] = {"content": _logprobs(tokens), "refusal": None}
        return self._head + orjson.dumps(choice) + self._tail


def usage(outcome: Outcome) -> dict[str, int]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }


def _logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.bytes),
            "top_logprobs": [
                {"token": other.text, "logprob": other.logprob, "bytes": list(other.bytes)} for other in token.top
            ],
        }
        for token in tokens
    ]
