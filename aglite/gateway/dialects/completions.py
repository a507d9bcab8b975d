"""OpenAI's text completion: `POST /v1/completions`, with a prompt of text or of token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import Outcome, Problem, Request, RequestError, TokenInfo
from aglite.gateway.dialects.chat import ChatDialect, openai_error, usage
from aglite.gateway.replies import Piece, Text


class CompletionsDialect(ChatDialect):
    """Errors and keep-alives are those of Chat Completions."""

    name = "completions"

    def parse(self, body: Any) -> Request:
        body = fields.as_object(body)
        kept = fields.asked(body)
        for name in ("echo", "suffix"):
            if body.get(name):
                raise RequestError(name, f"{name} is not supported")
        if (fields.integer(body, "best_of", 1) or 1) > (fields.integer(body, "n", 1, 128) or 1):
            raise RequestError("best_of", "best_of is not supported: ask for n completions")
        logprobs = fields.integer(body, "logprobs", 0, fields.TOP_LOGPROBS)
        return Request(
            prompt=_prompt(body.get("prompt")),
            max_tokens=fields.integer(body, "max_tokens", 1),
            stops=fields.stops(body),
            n=fields.integer(body, "n", 1, 128) or 1,
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(fields.mapping(body, "stream_options"), "include_usage"),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            model=fields.string(body, "model") or "",
            asked=kept,
        )

    def writer(self, request: Request, model: str) -> CompletionsWriter:  # type: ignore[override]
        return CompletionsWriter(request, model)

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        problem = super().context_problem(request, prompt_tokens, context_length)
        problem.param = "prompt"
        return problem


class CompletionsWriter:
    def __init__(self, request: Request, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets = [0] * request.n

    def open(self) -> bytes:
        return b""

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        if not text and not tokens:
            return b""
        return self._event([self._choice(index, text, tokens, None)])

    def close(self, outcome: Outcome) -> bytes:
        events = [self._event([self._choice(one.index, "", (), one.finish_reason)]) for one in outcome.choices]
        if self._request.include_usage:
            events.append(self._event([], usage=usage(outcome)))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def body(self, outcome: Outcome) -> bytes:
        choices = [self._choice(one.index, one.reply.text, one.tokens, one.finish_reason) for one in outcome.choices]
        return orjson.dumps({**self._head, "choices": choices, "usage": usage(outcome)})

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: " + orjson.dumps(openai_error(problem)) + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + orjson.dumps({**self._head, "choices": choices, **more}) + b"\n\n"

    def _choice(self, index: int, text: str, tokens: Sequence[TokenInfo], finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        offsets = list(accumulate((len(token.text) for token in tokens), initial=self._offsets[index]))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{one.text: one.logprob for one in (*reversed(token.top), token)} for token in tokens],
            "text_offset": offsets,
        }


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(one, int) and 0 <= one < 2**31 for one in value):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise RequestError("prompt", "prompt must be one prompt: several in one request are not supported")
    raise RequestError("prompt", "prompt must be a text or a list of token ids")
