"""Replies in the form of the Responses API: every event is as the official package types it, and what goes out as items
comes back as the same message."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import orjson
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from test_gateway_responses_dialect import BODY, DIALECT, JSON

from aglite.gateway.dialects.base import Choice, Outcome, Problem, Request, TokenInfo
from aglite.gateway.dialects.responses_items import RAW, messages_of
from aglite.gateway.dialects.responses_output import InputText
from aglite.gateway.replies import Reasoning, Reply, Text, ToolArguments, ToolStart

CUSTOM = ("apply_patch", "mcp__db__note")
FUNCTIONS = ("shell", "mcp__db__query", "made_up")
NOT_TYPED = {"store", "bytes"}
"""Fields that the API sends and the package's types do not name."""


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


MODELS: dict[str, type[pydantic.BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}


def check_types(value: Any, model: type[pydantic.BaseModel]) -> None:
    """Strictly what the package says, without fields that it does not know."""
    made = model.model_validate(value, strict=True)
    unknown = set(_unknown(made))
    assert not unknown - NOT_TYPED, unknown


def _unknown(value: Any):
    if isinstance(value, pydantic.BaseModel):
        yield from value.__pydantic_extra__ or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from _unknown(one)


def outcome(reply: Reply, finish: str = "stop", tokens: Any = ()) -> Outcome:
    return Outcome([Choice(0, reply, finish, tokens, 3)], 11, 7)


def written(pieces: list, finish: str = "stop", body: dict | None = None) -> tuple[list[dict], Reply]:
    """The events of a reply that arrives in these pieces."""
    request = DIALECT.parse({**BODY, **(body or {})})
    writer = DIALECT.writer(request, "m")
    reply = Reply()
    data = writer.open()
    for piece in pieces:
        reply.add([piece])
        data += writer.pieces(0, [piece], ())
    data += writer.close(outcome(reply, finish))
    return events_of(data), reply


def whole_body(reply: Reply, **more: Any) -> dict:
    request = DIALECT.parse({**BODY, **more})
    return orjson.loads(DIALECT.writer(request, "m").body(outcome(reply)))


def canonical(message: dict) -> dict:
    """What the gateway compares of a message."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        try:
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        except ValueError:
            arguments = arguments.strip()
        calls.append((call["id"], call["function"]["name"], arguments))
    return {"text": message["content"], "reasoning": message.get("reasoning_content", ""), "calls": calls}


TEXTS = st.text('ab\n "\\{é✓😀', min_size=1, max_size=8)
NEXT = itertools.count()


@st.composite
def calls(draw) -> list:
    """A call as it is sampled, its arguments in several pieces."""
    name = draw(st.sampled_from(CUSTOM + FUNCTIONS))
    other = draw(st.dictionaries(st.sampled_from(["cmd", "x"]), JSON, max_size=2))
    escaped = draw(st.booleans())
    if name in CUSTOM and draw(st.integers(0, 3)):
        arguments = json.dumps(
            {"input": draw(TEXTS | st.just(""))}, ensure_ascii=escaped, indent=draw(st.none() | st.just(1))
        )
    else:
        arguments = json.dumps(other, ensure_ascii=escaped)
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=5)))
    parts = [arguments[a:b] for a, b in itertools.pairwise([0, *cuts, len(arguments)])]
    return [ToolStart(0, f"call_{next(NEXT)}", name), *(ToolArguments(0, part) for part in parts)]


@st.composite
def replies(draw) -> list:
    """Pieces of one reply: reasoning, then texts and calls in any order."""
    pieces: list = [Reasoning(text) for text in draw(st.lists(TEXTS, max_size=2))]
    for block in draw(st.lists(st.lists(TEXTS.map(Text), min_size=1, max_size=2) | calls(), max_size=4)):
        pieces += block
    number = -1
    for piece in pieces:
        number += isinstance(piece, ToolStart)
        if isinstance(piece, ToolStart | ToolArguments):
            piece.index = number
    return pieces


@settings(max_examples=120)
@given(replies(), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans())
def test_what_is_written_is_typed_and_comes_back(pieces: list, finish: str, ids: bool, sealed: bool) -> None:
    include = {"include": ["reasoning.encrypted_content"]} if sealed else {}
    events, reply = written(pieces, finish, include)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        check_types(event, MODELS[event["type"]])
    last = events[-1]
    assert last["type"] == ("response.incomplete" if finish == "length" else "response.completed")
    response = last["response"]
    assert (
        response["usage"]["output_tokens"] == 7 and response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    )
    output = response["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events_make(events) == [_told(item) for item in output]
    body = whole_body(reply, **include)
    check_types(body, Response)
    for items in (output, body["output"]):
        back = [{k: v for k, v in item.items() if ids or k != "id"} for item in items]
        if sealed:
            back = [{k: v for k, v in item.items() if k != "content" or item["type"] != "reasoning"} for item in back]
        messages = messages_of([{"role": "user", "content": "q"}, *back, {"role": "user", "content": "r"}])
        assert len(messages) == 3
        assert canonical(messages[1]) == canonical(reply.message())


def events_make(events: list[dict]) -> list[dict]:
    """The items as a client puts them together from the deltas alone."""
    items: dict[int, dict] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = _told(event["item"])
        elif kind.endswith(".delta"):
            items[event["output_index"]]["said"] += event["delta"]
        elif kind.endswith(".done") and "item" not in event and "part" not in event:
            said = event.get("text", event.get("arguments", event.get("input")))
            assert said == items[event["output_index"]]["said"]
    return list(items.values())


def _told(item: dict) -> dict:
    said = item.get("arguments", item.get("input"))
    if said is None:
        said = "".join(part["text"] for part in item["content"])
    kept = {name: item[name] for name in ("id", "type", "call_id", "name", "namespace") if name in item}
    return {**kept, "said": said}


def test_the_order_of_events() -> None:
    pieces = [Reasoning("why"), Text("look"), ToolStart(0, "call_1", "shell"), ToolArguments(0, "{}")]
    pieces += [ToolStart(1, "call_2", "apply_patch"), ToolArguments(1, '{"input": "*'), ToolArguments(1, '"}')]
    events, _ = written(pieces)
    part = [
        "output_item.added",
        "content_part.added",
        "TEXT.delta",
        "TEXT.done",
        "content_part.done",
        "output_item.done",
    ]
    expected = [
        "created",
        "in_progress",
        *(kind.replace("TEXT", "reasoning_text") for kind in part),
        *(kind.replace("TEXT", "output_text") for kind in part),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    assert [event["type"] for event in events] == [f"response.{kind}" for kind in expected]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}


def test_keep_alives_and_failures_are_events_of_the_response() -> None:
    writer = DIALECT.writer(DIALECT.parse(BODY), "m")
    data = writer.open() + writer.pieces(0, [Text("a"), ToolStart(0, "c", "shell")], ()) + writer.keep_alive()
    data += writer.pieces(0, [ToolArguments(0, "{")], ())
    data += writer.error(Problem(503, "engine", "the engine failed", code="engine_error"))
    events = events_of(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check_types(event, MODELS[event["type"]])
    assert events[-3]["type"] == "response.in_progress"
    failed = events[-1]["response"]
    assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"] == {"code": "server_error", "message": "the engine failed"}
    assert [item["type"] for item in failed["output"]] == ["message"], "what was finished is told"
    over = DIALECT.context_problem(Request(), 100, 64)
    assert over.status == 400 and "64 tokens" in over.message
    failed = events_of(DIALECT.writer(DIALECT.parse(BODY), "m").error(over))[-1]["response"]
    assert failed["error"]["code"] == "context_length_exceeded"


def test_log_probabilities_belong_to_the_text() -> None:
    def token(text: str) -> TokenInfo:
        return TokenInfo(text, text.encode(), -0.5, (TokenInfo("x", b"x", -1.0),))

    tokens = [token(text) for text in ("<think>", "hm", "</think>", "\n\n", "Hel", "lo", "<|im_end|>")]
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    writer = DIALECT.writer(DIALECT.parse({**BODY, **body}), "m")
    reply = Reply("Hello", "hm")
    whole = orjson.loads(writer.body(outcome(reply, tokens=tokens)))
    (part,) = whole["output"][1]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["Hel", "lo"]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [120]}]
    writer = DIALECT.writer(DIALECT.parse({**BODY, **body}), "m")
    feeds = [[], [Reasoning("hm")], [], [], [Text("Hel")], [Text("lo")], []]
    data = writer.open()
    for said, one in zip(feeds, tokens, strict=True):
        data += writer.pieces(0, said, [one])
    events = events_of(data + writer.close(outcome(reply, tokens=tokens)))
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in delta] for delta in deltas] == [["Hel"], ["lo"]]
    assert events[-1]["response"]["output"][1]["content"] == [part]


@pytest.mark.parametrize(
    ("arguments", "text", "raw"),
    [
        ('{"input": "a\\nb"}', "a\nb", False),
        ('{ "input":"a\nb" }', "a\nb", False),
        ('{"input": "\\ud83d\\ude00"}', "😀", False),
        ('{"input": "\\udc00"}', "?", False),
        ('{"input": "\\ud83d and more"}', "\ufffdud83d and more", False),
        ('{"input": "cut \\u00', "cut ", False),
        ('{"input": ""}', "", False),
        ('{"input": 5}', '{"input": 5}', True),
        ('{"patch": "x"}', '{"patch": "x"}', True),
        ("", "", True),
    ],
)
def test_the_input_of_a_freeform_call(arguments: str, text: str, raw: bool) -> None:
    whole = InputText()
    assert whole.feed(arguments) + whole.finish() == text and whole.raw == raw
    reader = InputText()
    assert "".join([*map(reader.feed, arguments), reader.finish()]) == text and reader.raw == raw


def test_a_freeform_call_of_another_form_is_put_back_as_it_was() -> None:
    _, reply = written([ToolStart(0, "call_1", "apply_patch"), ToolArguments(0, '{"patch": "x"}')])
    (item,) = whole_body(reply)["output"]
    assert item["call_id"] == "call_1" + RAW and item["input"] == '{"patch": "x"}'
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "no"}
    messages = messages_of([item, output])
    assert messages[0] == reply.message()
    assert messages[1]["tool_call_id"] == "call_1"
