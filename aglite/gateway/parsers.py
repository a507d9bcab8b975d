"""From sampled tokens to the pieces of a reply, as they become certain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import orjson

from aglite.gateway.replies import Piece, Reasoning, Text, ToolArguments, ToolStart, new_call_id
from aglite.gateway.tokenizer import TextTokenizer


class ReplyParser(Protocol):
    """Reads one response."""

    stopped: str
    """The stop string that was seen, "" until then. Nothing is read after it."""

    def feed(self, token_ids: Sequence[int]) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class StopStrings:
    """Cuts text before the first stop string; what may yet become one is held back."""

    __slots__ = ("_held", "_stops", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.hit = ""
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        if not self._stops or self.hit:
            return "" if self.hit else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = max(partial_suffix(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not the whole, of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, UNTHINK = "<think>", "</think>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LONGEST_HEAD = 1024
"""Characters of a call after which its arguments, should they still begin, are not streamed."""

_SPACE_AT_END = re.compile(r"\s+\Z")


class HermesParser:
    """Replies with `<think>` at the start and tool calls as JSON between `<tool_call>` tags, all of it plain text.

    Arguments are streamed as sampled once name and opening brace are seen. A block that is no such call is given to
    the agent as text.
    """

    def __init__(self, tokenizer: TextTokenizer, *, stops: Sequence[str], tools: bool) -> None:
        self.stopped = ""
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._tools = tools
        self._state = "start"
        self._buffer = ""
        self._calls = 0
        self._searched = 0  # how much of the buffer is known to have no closing tag
        self._json = _Braces()

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        text = self._stops.feed(self._detokenizer.feed(token_ids))
        self.stopped = self._stops.hit
        return self._read(text) if text else []

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if not self.stopped:
            tail = self._stops.feed(self._detokenizer.finish())
            self.stopped = self._stops.hit
            if not self.stopped:
                tail += self._stops.finish()
            pieces = self._read(tail) if tail else []
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            if not self._whole_call(rest, pieces):
                pieces.append(Text(OPEN + rest))
        elif self._state == "reasoning":
            if rest:
                pieces.append(Reasoning(rest))
        elif rest and self._state in ("start", "text") and not (self._calls and rest.isspace()):
            pieces.append(Text(rest))
        return pieces

    def _read(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and getattr(self, f"_in_{self._state}")(pieces):
            pass
        return pieces

    # Each state takes what it can from the buffer and says whether another look at the rest can bring more.

    def _in_start(self, pieces: list[Piece]) -> bool:
        if self._buffer.startswith(THINK):
            self._buffer = self._buffer[len(THINK) :]
            self._state = "before_reasoning"
            return True
        if THINK.startswith(self._buffer):
            return False
        self._state = "text"
        return True

    def _in_before_reasoning(self, pieces: list[Piece]) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = "reasoning"
        return bool(self._buffer)

    def _in_reasoning(self, pieces: list[Piece]) -> bool:
        before, found, after = self._buffer.partition(UNTHINK)
        if found:
            if before.strip("\n"):
                pieces.append(Reasoning(before.rstrip("\n")))
            self._buffer = after
            self._state = "after_reasoning"
            return True
        self._hold(pieces, Reasoning, UNTHINK)
        return False

    def _in_after_reasoning(self, pieces: list[Piece]) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = "text"
        return bool(self._buffer)

    def _in_text(self, pieces: list[Piece]) -> bool:
        if not self._tools:
            pieces.append(Text(self._buffer))
            self._buffer = ""
            return False
        before, found, after = self._buffer.partition(OPEN)
        if found:
            if before.strip():
                pieces.append(Text(before.rstrip()))
            self._buffer = after
            self._state = "call"
            return True
        self._hold(pieces, Text, OPEN)
        return False

    def _in_call(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._buffer) if self._searched < _LONGEST_HEAD else None
        if head is not None:
            try:
                name = orjson.loads(head[1])
            except orjson.JSONDecodeError:
                name = ""
            if name:
                pieces.append(ToolStart(self._calls, new_call_id(), name))
                self._buffer = self._buffer[head.end() :]
                self._searched = 0
                self._json = _Braces()
                self._state = "arguments"
                return True
        at = self._close_at()
        if at < 0:
            return False
        block, self._buffer = self._buffer[:at], self._buffer[at + len(CLOSE) :]
        if not self._whole_call(block, pieces):
            pieces.append(Text(OPEN + block + CLOSE))
        self._state = "text"
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        taken = self._json.scan(self._buffer)
        pieces.append(ToolArguments(self._calls, self._buffer[:taken]))
        self._buffer = self._buffer[taken:]
        if not self._json.closed:
            return False
        self._calls += 1
        self._state = "after_call"
        return True

    def _in_after_call(self, pieces: list[Piece]) -> bool:
        at = self._close_at()
        if at < 0:
            return False
        self._buffer = self._buffer[at + len(CLOSE) :]
        self._state = "text"
        return True

    def _close_at(self) -> int:
        """Where the closing tag begins; -1: not there yet. What has been looked through is not looked through again."""
        at = self._buffer.find(CLOSE, max(0, self._searched - len(CLOSE)))
        self._searched = len(self._buffer) if at < 0 else 0
        return at

    def _hold(self, pieces: list[Piece], kind: type[Text] | type[Reasoning], marker: str) -> None:
        """Let go of all but the white space at the end and what may be the beginning of `marker`."""
        cut = len(self._buffer) - partial_suffix(self._buffer, marker)
        cut -= _trailing(self._buffer[:cut])
        if cut > 0:
            pieces.append(kind(self._buffer[:cut]))
            self._buffer = self._buffer[cut:]

    def _whole_call(self, block: str, pieces: list[Piece]) -> bool:
        """A block that could not be streamed, read at its end."""
        try:
            data = orjson.loads(block)
        except orjson.JSONDecodeError:
            return False
        if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
            return False
        arguments = data.get("arguments", data.get("parameters", {}))
        try:
            text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        except orjson.JSONEncodeError:  # it reads 1024 levels and writes 255
            return False
        pieces += [ToolStart(self._calls, new_call_id(), data["name"]), ToolArguments(self._calls, text)]
        self._calls += 1
        return True


class PlainParser:
    """Replies that are nothing but text."""

    def __init__(self, tokenizer: TextTokenizer, *, stops: Sequence[str]) -> None:
        self.stopped = ""
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        text = self._stops.feed(self._detokenizer.feed(token_ids))
        self.stopped = self._stops.hit
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        text = "" if self.stopped else self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        return [Text(text)] if text else []


def _trailing(text: str) -> int:
    """Length of the white space at the end: it belongs to the text only if more text follows."""
    found = _SPACE_AT_END.search(text)
    return len(text) - found.start() if found else 0


class _Braces:
    """Finds the end of a JSON object in text that arrives in pieces."""

    __slots__ = ("_depth", "_escaped", "_quoted", "closed")
    _SPECIAL = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self.closed = False

    def scan(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while (found := self._SPECIAL.search(text, at)) is not None:
            at = found.end()
            char = found[0]
            if self._quoted:
                if char == "\\":
                    if at == len(text):
                        self._escaped = True
                    at += 1
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return at
        return len(text)
