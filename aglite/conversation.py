"""Recorded calls as a conversation: what each call adds to what was said before."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def whole_list(call: Mapping[str, Any]) -> list[Message]:
    """The messages of a call's prompt followed by its reply, if it has one."""
    return [*call["messages"], *([call["reply"]] if call["reply"] else [])]


def added_messages(calls: Sequence[Sequence[Message]]) -> list[list[Message]]:
    """For each call's whole list of messages, those after the longest earlier list that it extends."""
    added = []
    earlier: list[list[Message]] = []  # the longest first: in a conversation that goes on, the first one looked at
    for messages in map(list, calls):
        fitting = (known for known in earlier if messages[: len(known)] == known)
        added.append(messages[len(next(fitting, ())) :])
        bisect.insort(earlier, messages, key=lambda known: -len(known))
    return added


def message_text(message: Message) -> str:
    """Content and tool calls of a chat message as plain text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)
    lines = [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"-> {function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(lines)


def message_lines(message: Message, indent: str = "") -> list[str]:
    """A message as indented lines that begin with its role."""
    first, *rest = message_text(message).splitlines() or [""]
    role = f"{message.get('role', '?')}: "
    return [f"{indent}{role}{first}", *(f"{indent}{' ' * len(role)}{line}" for line in rest)]
