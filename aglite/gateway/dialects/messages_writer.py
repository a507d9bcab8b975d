"""What Anthropic's Messages API answers: messages, their events, errors, models."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from aglite.gateway.arguments import ObjectPrefix, read_arguments
from aglite.gateway.dialects.base import Choice, Outcome, Problem, Request, TokenInfo
from aglite.gateway.replies import Piece, Reasoning, Text, ToolStart

SIGNATURE = "aglite"
"""Of every thinking block: nothing is verified by it, but some clients drop blocks that have none."""

INVALID_JSON = "INVALID_JSON"
"""Key under which arguments that are no JSON object are given as text, as Anthropic's documentation has it."""


class MessagesWriter:
    """Body and events of one message."""

    def __init__(self, request: Request, model: str) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._prompt_tokens = request.prompt_tokens
        self._block = -1
        self._kind = ""
        """Of the block that is open: text, thinking, tool_use; "" if none is."""
        self._delta = b""
        self._arguments = ObjectPrefix()

    def open(self) -> bytes:
        return _event("message_start", message=self._message([], None, None, _usage(self._prompt_tokens, 0)))

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, Text):
                self._enter("text", events)
                text = piece.text
            elif isinstance(piece, Reasoning):
                self._enter("thinking", events)
                text = piece.text
            elif isinstance(piece, ToolStart):
                self._leave(events)
                self._arguments = ObjectPrefix()
                block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                self._begin("tool_use", block, "input_json_delta", "partial_json", events)
                continue
            else:
                text = self._arguments.feed(piece.text)
            if text:
                events.append(self._delta + orjson.dumps(text) + b"}}\n\n")
        return b"".join(events)

    def close(self, outcome: Outcome) -> bytes:
        events: list[bytes] = []
        if self._block < 0:
            self._enter("text", events)
        self._leave(events)
        reason, sequence = _stop(outcome.choices[0])
        usage = _usage(outcome.prompt_tokens, outcome.completion_tokens)
        events.append(_event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage))
        events.append(_event("message_stop"))
        return b"".join(events)

    def body(self, outcome: Outcome) -> bytes:
        choice = outcome.choices[0]
        reply = choice.reply
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
        if reply.text or not (content or reply.tool_calls):
            content.append({"type": "text", "text": reply.text})
        for call in reply.tool_calls:
            arguments = read_arguments(call["arguments"])
            value = {INVALID_JSON: call["arguments"]} if arguments is None else arguments
            content.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": value})
        usage = _usage(outcome.prompt_tokens, outcome.completion_tokens)
        return orjson.dumps(self._message(content, *_stop(choice), usage))

    def keep_alive(self) -> bytes:
        return b'event: ping\ndata: {"type":"ping"}\n\n'

    def error(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + error_body(problem) + b"\n\n"

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _enter(self, kind: str, events: list[bytes]) -> None:
        """Have a block of text or of thinking open."""
        if self._kind == kind:
            return
        self._leave(events)
        block = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        self._begin(kind, block, f"{kind}_delta", kind, events)

    def _begin(self, kind: str, block: dict[str, Any], delta: str, field: str, events: list[bytes]) -> None:
        self._kind = kind
        self._block += 1
        events.append(_event("content_block_start", index=self._block, content_block=block))
        head = f'{{"type":"content_block_delta","index":{self._block},"delta":{{"type":"{delta}","{field}":'
        self._delta = b"event: content_block_delta\ndata: " + head.encode()

    def _leave(self, events: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            events.append(_event("content_block_delta", index=self._block, delta=signature))
        events.append(_event("content_block_stop", index=self._block))
        self._kind = ""


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Nothing is counted as read from a cache: the whole prompt is `input_tokens`."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }


def _stop(choice: Choice) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. A stop string after a whole tool call leaves the call to be answered."""
    calls = choice.reply.tool_calls
    whole = bool(calls) and read_arguments(calls[-1]["arguments"]) is not None
    if choice.stop and not whole:
        return "stop_sequence", choice.stop
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason], None


_ERROR_TYPES = {
    "auth": "authentication_error",
    "ended": "authentication_error",
    "not_found": "not_found_error",
    "limit": "permission_error",
    "too_large": "request_too_large",
    "held": "overloaded_error",
    "engine": "api_error",
    "store": "api_error",
}


def error_body(problem: Problem) -> bytes:
    error: dict[str, Any] = {
        "type": _ERROR_TYPES.get(problem.kind, "invalid_request_error"),
        "message": problem.message,
    }
    if problem.code is not None:
        error["details"] = {"error_code": problem.code}
    return orjson.dumps({"type": "error", "error": error, "request_id": None})


def models_body(name: str, context_length: int, *, one: bool) -> bytes:
    """`GET /v1/models`, or that of a single one; `context_length` 0 is not known."""
    model = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context_length or None,
        "max_tokens": context_length or None,
    }
    if one:
        return orjson.dumps(model)
    return orjson.dumps({"data": [model], "has_more": False, "first_id": name, "last_id": name})
