"""What was said in a rollout, call by call: pure functions from its JSON to lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from textual.content import Content

from aglite.conversation import added_messages, whole_list
from aglite.forks import diff_lines
from aglite.tui.widgets.turns import how

ROLES = {
    "system": ("◇", "$faint"),
    "developer": ("◇", "$faint"),
    "user": ("▷", "$primary"),
    "assistant": ("◆", "$success"),
    "tool": ("⚙", "$secondary"),
}
INDENT = "  "


class Talk:
    """The messages of a rollout. `anchors` has the line at which each call begins, once it was laid out."""

    def __init__(self, detail: Mapping[str, Any]) -> None:
        self._detail = detail
        self._added = added_messages([whole_list(call) for call in detail["call_rows"]])
        self.anchors: list[int] = []

    def layout(self, width: int) -> list[Content]:
        calls = self._detail["call_rows"]
        if not calls:
            return [Content.styled(" the agent has not called the model yet", "$faint")]
        numbers = {call["id"]: number for number, call in enumerate(calls, 1)}
        lines: list[Content] = []
        self.anchors = []
        for call, messages in zip(calls, self._added, strict=True):
            self.anchors.append(len(lines))
            lines.append(_rule(call, numbers, width))
            if call["fork_diff"]:
                lines += [_diff(line, width) for line in diff_lines(call["fork_diff"], numbers)]
            for message in messages:
                lines += message_lines(message, width)
            if call["error"]:
                lines += _body(call["error"], width, "$error")
            lines.append(Content(""))
        return lines[:-1]


def _rule(call: Mapping[str, Any], numbers: Mapping[int, int], width: int) -> Content:
    forked = bool(call["fork_cause"]) and numbers[call["id"]] > 1
    head = Content.assemble(
        ("━━ ", "$line"),
        (f"call {numbers[call['id']]} ", "bold $primary"),
        (f"{how(call, numbers)} ", "$accent" if forked else "$faint"),
        (f"· {call['dialect']} ", "$faint"),
    )
    return Content.assemble(head, ("━" * max(width - head.cell_length, 0), "$line")).truncate(width)


def _diff(line: str, width: int) -> Content:
    style = "$error" if line.lstrip().startswith("- ") else "$success" if line.lstrip().startswith("+ ") else "$faint"
    return Content.styled(f"{INDENT}{line}", style).truncate(width, ellipsis=True)


def message_lines(message: Mapping[str, Any], width: int) -> list[Content]:
    """A chat message: who says it, the text, and each tool call with its arguments."""
    role = str(message.get("role", "?"))
    sign, style = ROLES.get(role, ("▷", "$foreground"))
    name = f" {message['name']}" if message.get("name") else ""
    lines = [Content.assemble((f"{sign} {role}", f"bold {style}"), (name, "$faint"))]
    for part, faint in _parts(message):
        lines += _body(part, width, "$faint" if faint else "")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(
            Content.assemble(INDENT, ("→ ", "$secondary"), (str(function.get("name", "?")), "bold $secondary"))
        )
        lines += _body(_pretty(function.get("arguments", "")), width, "$secondary", indent=INDENT * 2)
    return lines


def _parts(message: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The texts of a message, and of each whether it is only reasoning or a name of what cannot be shown."""
    parts: list[tuple[str, bool]] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        parts.append((reasoning, True))
    content = message.get("content") or ""
    if isinstance(content, str):
        return [*parts, (content, False)] if content else parts
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else str(part)
        parts.append((text, False) if text is not None else (f"[{part.get('type', 'part')}]", True))
    return parts


def _pretty(arguments: Any) -> str:
    """Arguments of a tool, one a line where they are an object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # models write what they like
        return str(arguments)
    if not isinstance(value, dict):
        return str(arguments)
    return "\n".join(
        f"{key}: {item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)}"
        for key, item in value.items()
    )


def _body(text: str, width: int, style: str = "", indent: str = INDENT) -> list[Content]:
    room = max(width - len(indent), 2)
    lines = Content.styled(text.rstrip("\n"), style).wrap(room) if style else Content(text.rstrip("\n")).wrap(room)
    return [Content.assemble(indent, line) for line in lines]
