"""Arguments of tool calls: the JSON text that a model sampled, which need not be JSON at all."""

from __future__ import annotations

import math
import re
from typing import Any

import orjson

_DEPTH = 100
"""Deepest nesting that is passed on; the parsers of some clients end at 200."""

_SPACE = re.compile(r"[ \t\n\r]*+")
_WORD = re.compile(r"[-+.0-9a-zA-Z]++")
_SCALAR = re.compile(r"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)|true|false|null")
_RUN = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?"
)
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSING = (", or close", "key or }", "value or ]")

_INEXACT = re.compile(r"\d[.eE]|\d{16}")
"""Numbers that parsers of different languages may write back differently."""


class ObjectPrefix:
    """Lets text through, as it arrives in pieces, for as long as it can still become a JSON object.

    Some clients parse the arguments of a tool call while they arrive and end with an exception at what is no JSON.
    What they get is therefore always the beginning of an object, cut where the model left the grammar. Bare line breaks
    in strings, which many a model samples, are forgiven: they are passed on as escapes.
    """

    __slots__ = ("_held", "_key", "_quoted", "_stack", "_want", "broken")

    def __init__(self) -> None:
        self.broken = False
        """Text was seen that no JSON object continues with. Nothing is let through any more."""
        self._stack: list[str] = []
        self._want = "object"
        self._quoted = self._key = False
        self._held = ""  # space before the object; the beginning of a number, a literal or an escape

    @property
    def closed(self) -> bool:
        """Whether what was let through is a whole object."""
        return self._want == "end" and not self.broken

    def feed(self, text: str) -> str:
        """What may be passed on of the text, and of what was held back before it."""
        if self.broken:
            return ""
        text = self._held + text
        said, at = [], 0
        while at < len(text):
            quoted = self._quoted
            after = self._string(text, at) if quoted else self._token(text, at)
            if after <= at:
                break
            part = text[at:after]
            said.append(_CONTROL.sub(_escape, part) if quoted else part)
            at = after
        self._held = "" if self.broken else text[at:]
        return "".join(said)

    def _string(self, text: str, at: int) -> int:
        found = _RUN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._quoted = False
            self._want = "colon" if self._key else self._after_value()
            return at + 1
        self.broken = _ESCAPE_BEGUN.fullmatch(text, at) is None
        return at

    def _token(self, text: str, at: int) -> int:
        """Read one token. Returns where it ends; where it begins if it is unfinished or out of place."""
        found = _SPACE.match(text, at)
        assert found is not None
        if found.end() > at and self._want != "object":
            return found.end()
        if found.end() == len(text):  # space alone is no beginning of an object to a parser
            return at
        char, want = text[found.end()], self._want
        value = want in ("value", "value or ]")
        if char == "{" and (value or want == "object"):
            self._open("}", "key or }")
        elif char == "[" and value:
            self._open("]", "value or ]")
        elif char in "}]" and want in _CLOSING and char == self._stack[-1]:
            self._stack.pop()
            self._want = self._after_value()
        elif char == '"' and (value or want in ("key", "key or }")):
            self._quoted, self._key = True, not value
        elif char == ":" and want == "colon":
            self._want = "value"
        elif char == "," and want == ", or close":
            self._want = "key" if self._stack[-1] == "}" else "value"
        elif value and (word := _WORD.match(text, at)) is not None:
            if word.end() == len(text):
                return at
            scalar = _SCALAR.fullmatch(word[0])
            self.broken = scalar is None or (scalar[1] is not None and math.isinf(float(scalar[1])))
            self._want = self._after_value()
            return at if self.broken else word.end()
        else:
            self.broken = True
        return at if self.broken else found.end() + 1

    def _open(self, close: str, want: str) -> None:
        self._stack.append(close)
        self._want = want
        self.broken = len(self._stack) > _DEPTH

    def _after_value(self) -> str:
        return ", or close" if self._stack else "end"


def read_arguments(text: str) -> dict[str, Any] | None:
    """Sampled arguments as the object that they stand for; None if they are no JSON object (no text: an empty one)."""
    if not text or text.isspace():
        return {}
    if text.count("{") + text.count("[") <= _DEPTH:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # perhaps it is only a bare line break
        else:
            return value if isinstance(value, dict) else None
    prefix = ObjectPrefix()
    said = prefix.feed(text)
    return orjson.loads(said) if prefix.closed else None


def canonical(text: str) -> bytes | str:
    """A form that is equal for arguments that mean the same: the order of keys, white space, and how a language writes
    its numbers (JavaScript: 5 for 5.0) are left out. What is no JSON stays as it is."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        value = read_arguments(text)
        if value is None:
            return text.strip()
    try:
        return orjson.dumps(_doubles(value) if _INEXACT.search(text) else value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, RecursionError):  # nested too deeply
        return text.strip()


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _doubles(value: Any) -> Any:
    """All numbers as a language reads them that has doubles only."""
    if isinstance(value, dict):
        return {key: _doubles(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_doubles(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
