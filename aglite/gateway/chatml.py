"""ChatML, the prompt format of the demo model and of many others, with tools in the Hermes format.

    <|im_start|>ROLE
    CONTENT<|im_end|>

Tools are described in the system message; a call is JSON between `<tool_call>` tags in the assistant's text; results
come back as `<tool_response>` blocks in a user turn. Reasoning is not written back into a prompt that is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from aglite.gateway.grammar import Format, hermes_calls
from aglite.gateway.parsers import HermesParser, ReplyParser
from aglite.gateway.tokenizer import TextTokenizer

Message = dict[str, Any]

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class ChatMLRenderer:
    """Messages to tokens and back. `default_system` opens conversations that bring no system message (None: none)."""

    family = "chatml"
    keeps_call_ids = False

    def __init__(self, tokenizer: TextTokenizer, default_system: str | None) -> None:
        self.tokenizer = tokenizer
        self._default_system = default_system
        start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
        assert start is not None and end is not None, "load_renderer has looked for both"
        self._start, self._end = start, end
        ends = [end, tokenizer.token_id("<|endoftext|>"), tokenizer.eos_token_id]
        self.stop_ids = tuple(dict.fromkeys(number for number in ends if number is not None and number != start))
        self._newline = tokenizer.encode("\n")
        self._opening = [start, *tokenizer.encode("assistant\n")]

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The whole prompt, up to where the assistant's next turn begins."""
        system, rest = self._default_system, messages
        if messages and messages[0]["role"] == "system":
            system, rest = messages[0]["content"], messages[1:]
        if tools:
            described = "".join("\n" + orjson.dumps(tool).decode() for tool in tools)
            system = (f"{system}\n\n" if system else "") + _TOOLS_HEAD + described + _TOOLS_FOOT
        ids: list[int] = []
        if system is not None:
            ids = [self._start, *self.tokenizer.encode_plain("system\n" + system), self._end, *self._newline]
        self._turns(ids, rest)
        ids += self._opening
        return ids

    def bridge(
        self, prompt: Sequence[int], response: Sequence[int], new: Sequence[Message], tools: Sequence[Message]
    ) -> list[int]:
        """The tokens between a sampled response and the next one: its end of turn if the model was cut off before it,
        the new messages, the opening of the assistant's turn."""
        closed = len(response) > 0 and response[-1] in self.stop_ids
        ids = [*self._newline] if closed else [self._end, *self._newline]
        self._turns(ids, new)
        ids += self._opening
        return ids

    def parser(self, prompt: Sequence[int], *, tools: Sequence[Message], stops: Sequence[str]) -> ReplyParser:
        return HermesParser(self.tokenizer, stops=stops, tools=bool(tools))

    def calls_format(self, functions: Sequence[tuple[str, Format]], one_call: bool) -> Format:
        return hermes_calls(self.tokenizer, functions, one_call)

    def framed(self, prompt: Sequence[int], answer: Format) -> Format:
        return answer

    def _turns(self, ids: list[int], messages: Sequence[Message]) -> None:
        at = 0
        while at < len(messages):
            role = messages[at]["role"]
            if role == "tool":
                results = []
                while at < len(messages) and messages[at]["role"] == "tool":
                    results.append(f"\n<tool_response>\n{messages[at]['content']}\n</tool_response>")
                    at += 1
                text = "user" + "".join(results)
            else:
                content = messages[at]["content"]
                text = f"{role}\n{_with_calls(messages[at]) if role == 'assistant' else content}"
                at += 1
            ids.append(self._start)
            ids += self.tokenizer.encode_plain(text)
            ids.append(self._end)
            ids += self._newline


def _with_calls(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name = orjson.dumps(function["name"]).decode()
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}\n</tool_call>')
    return "\n".join(parts)
