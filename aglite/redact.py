"""Masking: what matches a recipe's patterns is replaced wherever text is shown, exported or, if asked, stored.

Patterns are RE2's (https://github.com/google/re2/wiki/Syntax): one match takes time linear in the text, so no pattern
can hang the gateway. Token ids are never touched.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

MARK = "[redacted]"
"""What stands in the place of masked text."""

NAMED = {
    "emails": r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+",
    "api_keys": (
        r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}"  # OpenAI, Anthropic, OpenRouter, Stripe
        r"|\b(?:gh[opusr]_|github_pat_|glpat-|hf_|xox[abeoprs]-|pypi-|npm_|aglite-)[A-Za-z0-9_\-]{16,}"
        r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_\-]{35}"  # AWS, Google
        r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+"  # JSON web tokens
        r"|(?i:\bbearer\s+)[A-Za-z0-9._~+/\-]{16,}=*"
    ),
}
"""Patterns with a name of their own in a recipe."""

MESSAGE_KEYS = frozenset({"role", "type", "id", "tool_call_id"})
"""Keys of a message whose values are its structure, not what was said."""

BUDGET_S = 0.5
"""Most time of the processor in seconds for one pattern in one text. One that matches in very many places may take
quadratic time; what it has not looked at by then is masked whole."""


class Redactor:
    """Masks what any of `patterns` matches. Without patterns everything is left as it is (and the object is false)."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError for what RE2 does not take."""
        self._patterns = [compiled(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """The text with every match masked; also of matches that JSON inside it hides behind escapes."""
        data = text.encode(errors="surrogatepass")
        masked = self.data(data)
        if masked is not data:
            text = _decode(masked)
        if "\\" in text and text.lstrip()[:1] in ("{", "[", '"'):
            text = self._json(text)
        return text

    def data(self, data: bytes) -> bytes:
        """The same for UTF-8 as bytes, whatever else is among them; the very same object when nothing matches."""
        spans = [span for pattern in self._patterns for span in _spans(pattern, data)]
        if not spans:
            return data
        # A mark that is there already is masked whole or not at all: to mask again then changes nothing.
        mark = MARK.encode()
        at = data.find(mark)
        while at >= 0:
            spans.append((at, at + len(mark)))
            at = data.find(mark, at + 1)
        parts, end = [], 0
        for start, stop in _merged(spans):
            parts += [data[end:start], mark]
            end = stop
        return b"".join([*parts, data[end:]])

    def value(self, value: Any, keep: frozenset[str] = frozenset()) -> Any:
        """The texts anywhere in a JSON value masked, but for those that are values of a key in `keep`. Keys are masked
        too where nothing is kept, as they are people's own there. What needs no masking may be shared with `value`."""
        if not self._patterns:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                key if keep else self.text(str(key)): (
                    inner if key in keep and isinstance(inner, str) else self.value(inner, keep)
                )
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(inner, keep) for inner in value]
        return value

    def message(self, message: Mapping[str, Any]) -> Any:
        """A chat message with what was said in it masked."""
        return self.value(message, MESSAGE_KEYS)

    def _json(self, text: str) -> str:
        try:
            value = json.loads(text)
            masked = self.value(value)
            return text if masked == value else json.dumps(masked, ensure_ascii=False)
        except ValueError:
            return text
        except RecursionError:  # nested deeper than it can be looked into
            return MARK


@functools.lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """An RE2 pattern. Raises ValueError saying what is wrong with it."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"not a pattern of RE2: {reason}") from None


def _spans(pattern: Any, data: bytes) -> Iterable[tuple[int, int]]:
    deadline = 0.0
    for match in pattern.finditer(data):
        start, stop = match.span()
        if start == stop:
            continue
        yield start, stop
        now = time.thread_time()
        deadline = deadline or now + BUDGET_S
        if now > deadline:
            yield stop, len(data)
            return


def _merged(spans: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Spans that touch or overlap as one, in order."""
    spans.sort()
    start, stop = spans[0]
    for begin, end in spans[1:]:
        if begin > stop:
            yield start, stop
            start, stop = begin, end
        else:
            stop = max(stop, end)
    yield start, stop


def _decode(data: bytes) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError:  # a pattern with \C cut a character in two
        return data.decode(errors="replace")
