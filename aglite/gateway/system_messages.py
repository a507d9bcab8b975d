"""System messages where a model's family takes only one, at the beginning: agents send several, and in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]

_PROBE = [
    {"role": "system", "content": "first"},
    {"role": "system", "content": "second"},
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "system", "content": "third"},
    {"role": "user", "content": "question"},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}]


def takes_many(render: Callable[[list[Message], list[Message] | None], str]) -> bool:
    """Whether a family shows several system messages to the model; `render` gives the prompt as text."""
    for tools in (None, _TOOLS):
        try:
            text = render(_PROBE, tools)
        except Exception:  # a family may raise whatever it likes at a conversation that it does not take
            return False
        if not all(word in text for word in ("first", "second", "third")):
            return False
    return True


def fitted(messages: Sequence[Message], *, from_start: bool) -> list[Message]:
    """The messages with one system message: those at the beginning as one, later ones as messages of the user."""
    messages = list(messages)
    leading = 0
    while from_start and leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    system = [{"role": "system", "content": "\n\n".join(one["content"] for one in messages[:leading])}]
    later = [{**one, "role": "user"} if one["role"] == "system" else one for one in messages[leading:]]
    return (system if leading else []) + later
