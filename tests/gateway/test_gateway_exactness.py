"""Whatever is said, in whatever dialect, and however a harness writes its history back: what only appends continues."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import orjson
import pytest

from aglite.gateway.continuation import Conversations
from aglite.gateway.dialects.base import Choice, Outcome
from aglite.gateway.dialects.chat import ChatDialect
from aglite.gateway.dialects.messages import MessagesDialect
from aglite.gateway.dialects.responses import ResponsesDialect
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.replies import Reply

WORDS = ["hello", "\u00e9\u0301", "👩\u200d🔬", "中文", " ", "\n", "\t", "\u00a0", "\u2028", "\ufeff", "\x00", "\x7f"]
WORDS += ["<|im_end|>", "<|im_start|>user\n", "<think>", "</think>", "<tool_response>", "</tool_call>"]
WORDS += ["\\", '"', "{}", "\U0010ffff", "a" * 50]
SPOKEN = [word for word in WORDS if word not in ("<|im_end|>", "<|im_start|>user\n", "<think>", "</think>", "\x00")]
VALUES: list[Any] = [
    1,
    1.0,
    -0.0,
    2.50,
    1e21,
    10**17,
    1e-7,
    True,
    None,
    "",
    "x\ny",
    [],
    {},
    [[1, {"b": 2.0, "a": "é"}]],
]


def _text(rng: random.Random, words: list[str], most: int = 6) -> str:
    return "".join(rng.choice(words) for _ in range(rng.randint(1, most)))


def _sampled(rng: random.Random) -> str:
    """A response of the model, as text."""
    said = f"<think>\n{_text(rng, SPOKEN)}.\n</think>\n\n" if rng.random() < 0.4 else ""
    if rng.random() < 0.7:
        said += _text(rng, SPOKEN)
    for _ in range(rng.choice([0, 0, 1, 1, 3])):
        arguments = {rng.choice(["a", "b", "é", "z z"]): rng.choice(VALUES) for _ in range(rng.randint(0, 3))}
        text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        said += f'\n<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    return said


def _javascript(value: Any) -> Any:
    """A value after JSON.parse: whole numbers have no fraction."""
    if isinstance(value, dict):
        return {key: _javascript(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_javascript(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def _again(rng: random.Random, arguments: str) -> str:
    value = json.loads(arguments or "{}")
    if rng.random() < 0.5:
        value = _javascript(value)
    return json.dumps(value, sort_keys=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", ": ")]))


def _chat(rng: random.Random, body: dict[str, Any]) -> list[dict[str, Any]]:
    message = dict(body["choices"][0]["message"])
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = _again(rng, call["function"]["arguments"])
    if rng.random() < 0.5:
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)
    if message.get("content") and rng.random() < 0.3:
        message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": _text(rng, WORDS)}
        for call in message.get("tool_calls") or ()
    ]
    return [message, *results, *([] if results else [{"role": "user", "content": _text(rng, WORDS)}])]


def _responses(rng: random.Random, body: dict[str, Any]) -> list[dict[str, Any]]:
    drop, bare = rng.random() < 0.4, rng.random() < 0.4
    items = [item for item in body["output"] if not (drop and item["type"] == "reasoning")] or body["output"]
    if bare:  # some send no ids
        items = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    for item in items:
        if item["type"] == "function_call":
            item["arguments"] = _again(rng, item["arguments"])
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": _text(rng, WORDS)} for one in calls]
    return [*items, *(results or [{"role": "user", "content": _text(rng, WORDS)}])]


def _messages(rng: random.Random, body: dict[str, Any]) -> list[dict[str, Any]]:
    drop = rng.random() < 0.5
    blocks = [block for block in body["content"] if not (drop and block["type"] == "thinking")]
    for block in blocks:
        if block["type"] == "tool_use" and rng.random() < 0.5:
            block["input"] = _javascript(block["input"])
    if blocks and rng.random() < 0.3 and blocks[-1]["type"] != "thinking":
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": _text(rng, WORDS)}]}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if not results or rng.random() < 0.3:
        results.append({"type": "text", "text": _text(rng, WORDS)})
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


DIALECTS = {
    "chat": (ChatDialect(), "messages", _chat, [{"type": "function", "function": {"name": "f"}}]),
    "responses": (ResponsesDialect(), "input", _responses, [{"type": "function", "name": "f"}]),
    "messages": (MessagesDialect(), "messages", _messages, [{"name": "f", "input_schema": {}}]),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_append_continues(renderer: ChatRenderer, name: str) -> None:
    dialect, field, back, tools = DIALECTS[name]
    for seed in range(120):
        rng = random.Random(f"{name} {seed}")
        conversations = Conversations(renderer, "exact")
        history: list[dict[str, Any]] = [{"role": "user", "content": _text(rng, WORDS)}]
        recorded: list[int] = []
        for turn in range(5):
            request = dialect.parse({field: history, "tools": tools, "max_tokens": 100, "model": "m"})
            plan = conversations.plan(request.messages, request.tools)
            prompt = plan.prompt_ids.tolist()
            assert plan.cause == ("first" if turn == 0 else ""), (seed, turn, history[-4:])
            assert prompt[: len(recorded)] == recorded
            said = _sampled(rng)
            ids = [*renderer.tokenizer.encode(said), renderer.stop_ids[0]]
            parser = renderer.parser(prompt, tools=request.tools, stops=())
            reply = Reply()
            for token in ids:
                reply.add(parser.feed([token]))
            reply.add(parser.finish())
            conversations.record(
                plan, array("i", ids).tobytes(), reply.message(), turn + 1, delivered=True, continuable=True
            )
            recorded = prompt + ids
            outcome = Outcome([Choice(0, reply, "tool_calls" if reply.tool_calls else "stop")], len(prompt), len(ids))
            history = history + back(rng, orjson.loads(dialect.writer(request, "m").body(outcome)))
            if name == "messages" and not history[-2]["content"]:  # the API takes no empty turn; harnesses write so
                history[-2]["content"] = ""
