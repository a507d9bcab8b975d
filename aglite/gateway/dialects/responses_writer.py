"""Body and events of one response: every event numbered, every output item begun, grown and done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from aglite.gateway.dialects.base import Outcome, Problem, Request, TokenInfo
from aglite.gateway.dialects.responses_output import (
    Item,
    Memo,
    MessageItem,
    ReasoningItem,
    Status,
    call_item,
    logprob_of,
    of_text,
)
from aglite.gateway.replies import Piece, Reasoning, Text, ToolStart


class ResponsesWriter:
    """Writes one response."""

    def __init__(self, request: Request, model: str) -> None:
        assert request.reply_id is not None
        self.reply_id = request.reply_id
        self.memo: Memo = request.memo
        created = int(time.time() if self.memo.created_at is None else self.memo.created_at)
        head = {"id": self.reply_id, "object": "response", "created_at": created, "model": model}
        self._head = orjson.dumps({**head, **self.memo.echo})[:-1]
        self._logprobs = request.logprobs
        self._number = 0
        self._heads: dict[str, bytes] = {}
        self._done: list[bytes] = []  # the finished output items
        self._item: Item | None = None
        self._tokens: list[TokenInfo] = []  # sampled, but not shown yet

    def open(self) -> bytes:
        return self._lifecycle("created", "in_progress") + self._lifecycle("in_progress", "in_progress")

    def keep_alive(self) -> bytes:
        return self._lifecycle("in_progress", "in_progress")

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        self._tokens += tokens
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, Text):
                events += self._into(MessageItem, piece.text)
            elif isinstance(piece, Reasoning):
                events += self._into(ReasoningItem, piece.text)
            elif isinstance(piece, ToolStart):
                events += self._finish("completed")
                events += self._begin(call_item(self, piece, self.memo.origins.get(piece.name)))
            else:
                assert self._item is not None, "arguments follow the start of their call"
                events += self._item.add(piece.text)
            if not isinstance(piece, Text):
                self._tokens.clear()
        return b"".join(events)

    def close(self, outcome: Outcome) -> bytes:
        events = self._end(outcome)
        status, more = _ending(outcome)
        events.append(self._lifecycle(status, status, self._output(), **more))
        return b"".join(events)

    def body(self, outcome: Outcome) -> bytes:
        (choice,) = outcome.choices
        tokens = of_text(choice.tokens, choice.reply.text, after=choice.reply.reasoning)
        for piece in choice.reply.pieces():
            self.pieces(0, (piece,), tokens if isinstance(piece, Text) else ())
        self._end(outcome)
        status, more = _ending(outcome)
        return self._response(status, self._output(), **more)

    def error(self, problem: Problem) -> bytes:
        code = problem.code if problem.kind == "context_length" else "server_error"
        return self._lifecycle("failed", "failed", self._output(), error={"code": code, "message": problem.message})

    # items

    def _into(self, kind: type[MessageItem | ReasoningItem], text: str) -> list[bytes]:
        if not text:
            return []
        events: list[bytes] = []
        if not isinstance(self._item, kind):
            events += self._finish("completed")
            events += self._begin(kind(self))
        assert self._item is not None
        return events + self._item.add(text)

    def _begin(self, item: Item) -> list[bytes]:
        self._item = item
        return item.begin()

    def _finish(self, status: Status) -> list[bytes]:
        item, self._item = self._item, None
        if item is None:
            return []
        events = item.end()
        whole = orjson.dumps(item.whole(status))
        self._done.append(whole)
        return [*events, self.event("output_item.done", b'{"output_index":%d,"item":%b}' % (item.index, whole))]

    def _end(self, outcome: Outcome) -> list[bytes]:
        """Finish what is open. A reply of nothing is an empty message, so that it comes back with the conversation."""
        events: list[bytes] = []
        if self._item is None and not self._done:
            events = self._begin(MessageItem(self))
        status: Status = "incomplete" if outcome.choices[0].finish_reason == "length" else "completed"
        return events + self._finish(status)

    def next_index(self) -> int:
        return len(self._done)

    def take_logprobs(self, text: str, first: bool) -> list[dict[str, Any]]:
        """Of the tokens that a piece of text was made of."""
        if not self._logprobs:
            return []
        tokens, self._tokens = self._tokens, []
        return [logprob_of(token) for token in (of_text(tokens, text) if first else tokens)]

    # events

    def event(self, kind: str, fields: dict[str, Any] | bytes) -> bytes:
        rest = fields if isinstance(fields, bytes) else orjson.dumps(fields)
        return self.numbered(kind, rest[1:])

    def numbered(self, kind: str, fields: bytes) -> bytes:
        """The same for fields without their opening brace."""
        head = self._heads.get(kind)
        if head is None:
            head = self._heads[kind] = f'event: response.{kind}\ndata: {{"type":"response.{kind}"'.encode()
        number = self._number
        self._number += 1
        return b'%b,"sequence_number":%d,%b\n\n' % (head, number, fields)

    def _lifecycle(self, kind: str, status: str, output: bytes = b"[]", **more: Any) -> bytes:
        return self.event(kind, b'{"response":' + self._response(status, output, **more) + b"}")

    def _response(self, status: str, output: bytes, **more: Any) -> bytes:
        fields = {"status": status, "error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return self._head + b',"output":' + output + b"," + orjson.dumps({**fields, **more})[1:]

    def _output(self) -> bytes:
        return b"[" + b",".join(self._done) + b"]"


def _ending(outcome: Outcome) -> tuple[str, dict[str, Any]]:
    more: dict[str, Any] = {"usage": usage(outcome)}
    if outcome.choices[0].finish_reason == "length":
        return "incomplete", {**more, "incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {**more, "completed_at": int(time.time())}


def usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": outcome.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in outcome.choices)},
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }
