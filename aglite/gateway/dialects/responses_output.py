"""Output items of one response as they grow: message, reasoning, calls of functions and of freeform tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from aglite.gateway.dialects.base import TokenInfo
from aglite.gateway.dialects.responses_items import RAW, item_id, seal
from aglite.gateway.dialects.responses_tools import Origin
from aglite.gateway.replies import ToolStart

if TYPE_CHECKING:
    from aglite.gateway.dialects.responses_writer import ResponsesWriter

Status = Literal["completed", "incomplete"]


@dataclass(slots=True)
class Memo:
    """What the writer needs to know of a request."""

    echo: Mapping[str, Any]
    """Fields of the response that repeat the request."""
    origins: Mapping[str, Origin]
    seals_reasoning: bool = False
    """Whether reasoning is wanted as `encrypted_content` too."""
    created_at: float | None = None
    """None: now."""


class Item:
    """One output item as it grows."""

    prefix = ""
    delta = ""
    """Kind of the event that brings a piece of the item's text."""
    part_index: int | None = None
    """Of the content part that the text is in, for items that have such."""

    def __init__(self, writer: ResponsesWriter) -> None:
        self.writer = writer
        self.index = writer.next_index()
        self.id = item_id(self.prefix, writer.reply_id, self.index)
        self.texts: list[str] = []
        part = "" if self.part_index is None else f',"content_index":{self.part_index}'
        self._where = f'"output_index":{self.index},"item_id":"{self.id}"{part},"delta":'.encode()

    def begin(self) -> list[bytes]:
        return [self.event("output_item.added", item=self.whole("in_progress"))]

    def add(self, text: str) -> list[bytes]:
        return [self.said(text)]

    def said(self, text: str, tail: bytes = b"}") -> bytes:
        """A piece of text, and the event of it: the one that comes with every token, so it is put together by hand."""
        self.texts.append(text)
        return self.writer.numbered(self.delta, self._where + orjson.dumps(text) + tail)

    def end(self) -> list[bytes]:
        raise NotImplementedError

    def whole(self, status: str) -> dict[str, Any]:
        """The item with all it has so far."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def event(self, kind: str, **fields: Any) -> bytes:
        return self.writer.event(kind, {"output_index": self.index, **fields})

    def within(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, item_id=self.id, **fields)


class MessageItem(Item):
    prefix = "msg"
    delta = "output_text.delta"
    part_index = 0

    def __init__(self, writer: ResponsesWriter) -> None:
        super().__init__(writer)
        self.logprobs: list[dict[str, Any]] = []
        self.begun = False

    def begin(self) -> list[bytes]:
        events = super().begin()
        self.begun = True
        return [*events, self.within("content_part.added", content_index=self.part_index, part=self.part())]

    def add(self, text: str) -> list[bytes]:
        logprobs = self.writer.take_logprobs(text, not self.texts)
        self.logprobs += logprobs
        return [self.said(text, b',"logprobs":%b}' % orjson.dumps(logprobs) if logprobs else b',"logprobs":[]}')]

    def end(self) -> list[bytes]:
        return [
            self.within("output_text.done", content_index=self.part_index, text=self.text, logprobs=self.logprobs),
            self.within("content_part.done", content_index=self.part_index, part=self.part()),
        ]

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def whole(self, status: str) -> dict[str, Any]:
        content = [self.part()] if self.begun else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class ReasoningItem(Item):
    prefix = "rs"
    delta = "reasoning_text.delta"
    part_index = 0

    def begin(self) -> list[bytes]:
        return [*super().begin(), self.within("content_part.added", content_index=self.part_index, part=self.part())]

    def end(self) -> list[bytes]:
        return [
            self.within("reasoning_text.done", content_index=self.part_index, text=self.text),
            self.within("content_part.done", content_index=self.part_index, part=self.part()),
        ]

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def whole(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
        item["content"] = [self.part()] if self.texts else []
        if self.writer.memo.seals_reasoning:
            item["encrypted_content"] = seal(self.text) if self.texts else None
        return item


class FunctionCallItem(Item):
    prefix = "fc"
    delta = "function_call_arguments.delta"

    def __init__(self, writer: ResponsesWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(writer)
        self.call_id, self.name, self.namespace = call_id, name, namespace

    def end(self) -> list[bytes]:
        return [self.within("function_call_arguments.done", arguments=self.text)]

    def whole(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        return {**item, **_name(self.name, self.namespace), "arguments": self.text}


class CustomCallItem(Item):
    """A call of a freeform tool: its input is taken out of the sampled `{"input": "..."}` as it comes."""

    prefix = "ctc"
    delta = "custom_tool_call_input.delta"

    def __init__(self, writer: ResponsesWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(writer)
        self.call_id, self.name, self.namespace = call_id, name, namespace
        self.arguments = InputText()

    def begin(self) -> list[bytes]:
        return []  # not before the first characters tell the call's id, which says how the input was written

    def add(self, text: str) -> list[bytes]:
        return self._became(self.arguments.feed(text))

    def end(self) -> list[bytes]:
        events = self._became(self.arguments.finish())
        if not self.texts:  # an empty input
            events = super().begin()
        return [*events, self.within("custom_tool_call_input.done", input=self.text)]

    def whole(self, status: str) -> dict[str, Any]:
        call_id = self.call_id + (RAW if self.arguments.raw else "")
        item = {"id": self.id, "type": "custom_tool_call", "call_id": call_id}
        return {**item, **_name(self.name, self.namespace), "input": self.text}

    def _became(self, text: str) -> list[bytes]:
        if not text:
            return []
        events = [] if self.texts else super().begin()
        return [*events, self.said(text)]


def call_item(writer: ResponsesWriter, start: ToolStart, origin: Origin | None) -> Item:
    if origin is None:
        return FunctionCallItem(writer, start.id, start.name, None)
    kind = CustomCallItem if origin.kind == "custom" else FunctionCallItem
    return kind(writer, start.id, origin.name, origin.namespace)


def _name(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name} if namespace is None else {"name": name, "namespace": namespace}


class InputText:
    """Reads the text of `{"input": "text"}` while it arrives. Arguments of another form are taken as they are."""

    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _HEAD_BEGUN = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?\Z')
    _UNIT = re.compile(
        r'[^"\\]+|\\(?:["\\/bfnrt]'
        r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        r"|u(?![dD][89abAB])[0-9a-fA-F]{4})"
    )
    _LONGEST_UNIT = len(r"\ud83d\ude00")

    def __init__(self) -> None:
        self.raw = False
        """Whether the arguments are of another form."""
        self._inside = self._closed = False
        self._buffer = ""

    def feed(self, text: str) -> str:
        """What of the input has become certain."""
        if self._closed:
            return ""
        self._buffer += text
        if not self._inside and not self.raw:
            head = self._HEAD.match(self._buffer)
            if head is not None:
                self._inside = True
                self._buffer = self._buffer[head.end() :]
            elif not self._HEAD_BEGUN.match(self._buffer):
                self.raw = True
        if self.raw:
            text, self._buffer = self._buffer, ""
            return text
        return self._units() if self._inside else ""

    def finish(self) -> str:
        """The rest, when nothing more comes."""
        if self._inside:
            return ""  # cut off; half an escape is no text
        self.raw = True
        text, self._buffer = self._buffer, ""
        return text

    def _units(self) -> str:
        texts, at = [], 0
        while True:
            found = self._UNIT.match(self._buffer, at)
            if found is not None:
                texts.append(_unescaped(found[0]))
                at = found.end()
            elif self._buffer.startswith('"', at):
                self._closed = True
                break
            elif len(self._buffer) - at >= self._LONGEST_UNIT:  # no escape of JSON
                texts.append("\ufffd")
                at += 1
            else:
                break
        self._buffer = self._buffer[at:]
        return "".join(texts)


def _unescaped(text: str) -> str:
    if not text.startswith("\\"):
        return text
    return json.loads(f'"{text}"').encode(errors="replace").decode()


def of_text(tokens: Sequence[TokenInfo], text: str, after: str = "") -> Sequence[TokenInfo]:
    """Those of the tokens that `text` was made of, which came after `after`: without markers before it and the end of
    turn after it. All of them where the text cannot be found in their bytes."""
    wanted = text.encode()
    joined = b"".join(token.bytes for token in tokens)
    start = joined.find(wanted, max(0, joined.find(after.encode())) + len(after.encode()))
    if start < 0:
        return tokens
    kept, at = [], 0
    for token in tokens:
        if at + len(token.bytes) > start and at < start + len(wanted):
            kept.append(token)
        at += len(token.bytes)
    return kept


def logprob_of(token: TokenInfo) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.bytes),
        "top_logprobs": [{"token": t.text, "logprob": t.logprob, "bytes": list(t.bytes)} for t in token.top],
    }
