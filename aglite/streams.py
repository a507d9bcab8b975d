"""Standard output and error that take any text: what a terminal's character set lacks is written in ASCII."""

from __future__ import annotations

import codecs
import contextlib
from typing import Any

SPELLED = dict(zip("▁▂▃▄▅▆▇█━╸─·→±–…✓✗", [*"_.,-=+*#=--;", "->", "+-", "-", "...", "ok", "x"], strict=True))
"""What the few other characters of aglite's own become."""


def lenient(*streams: Any) -> None:
    """Let these text streams write what they cannot encode as best they can, instead of raising UnicodeEncodeError."""
    codecs.register_error("aglite", _spelled)
    for stream in streams:
        with contextlib.suppress(AttributeError, ValueError):  # a stand-in for a stream, a closed one
            stream.reconfigure(errors="aglite")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(SPELLED.get(character, "?") for character in text), error.end
