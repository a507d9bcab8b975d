"""What a reply is made of: pieces of text, reasoning and tool calls as they become certain, and all of them together.

A stream and a whole body come out of the same pieces, so they say the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Text:
    text: str


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class ToolStart:
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolArguments:
    index: int
    text: str


Piece = Text | Reasoning | ToolStart | ToolArguments


@dataclass(slots=True)
class Reply:
    """The pieces of one response put together."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """{"id", "name", "arguments"}; arguments is the JSON text as sampled."""

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, Reasoning):
                self.reasoning += piece.text
            elif isinstance(piece, ToolStart):
                self.tool_calls.append({"id": piece.id, "name": piece.name, "arguments": ""})
            else:
                self.tool_calls[piece.index]["arguments"] += piece.text

    def pieces(self) -> list[Piece]:
        """The reply as pieces again."""
        pieces: list[Piece] = [Reasoning(self.reasoning)] if self.reasoning else []
        pieces += [Text(self.text)] if self.text else []
        for index, call in enumerate(self.tool_calls):
            pieces += [ToolStart(index, call["id"], call["name"]), ToolArguments(index, call["arguments"])]
        return pieces

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Reply:
        """The reply that `message()` was made of."""
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
        return cls(message["content"], message.get("reasoning_content", ""), calls)

    def message(self) -> dict[str, Any]:
        """As a message of the conversation, in the form that requests are normalised to."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in self.tool_calls
            ]
        return message


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
