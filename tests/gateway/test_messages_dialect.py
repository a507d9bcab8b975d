"""The Messages dialect alone: anything goes in, and what comes out is the API's own and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from anthropic import BaseModel as ApiModel
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from test_gateway_dialects import JSON

from aglite.gateway.dialects.base import Choice, Outcome, Problem, Request, RequestError
from aglite.gateway.dialects.messages import CountTokensDialect, MessagesDialect
from aglite.gateway.dialects.messages_writer import models_body
from aglite.gateway.replies import Piece, Reasoning, Reply, Text, ToolArguments, ToolStart

DIALECT = MessagesDialect()
BODY = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
EVENT = TypeAdapter(RawMessageStreamEvent)
BETA_EVENT = TypeAdapter(BetaRawMessageStreamEvent)


def parse(**fields: Any) -> Request:
    return DIALECT.parse({**BODY, **fields})


def user(*blocks: dict) -> list[dict]:
    return [{"role": "user", "content": list(blocks)}]


# what goes in

FIELDS = """model max_tokens messages role content type text tools tool_choice name input_schema description system
stream stop_sequences temperature top_p top_k thinking output_config output_format format schema metadata tool_use_id
input id is_error thread compaction mcp_servers signature disable_parallel_tool_use effort"""
NAMES = st.sampled_from(FIELDS.split())
KINDS = st.sampled_from(
    [
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "image",
        "tool_reference",
        "custom",
        "any",
        "tool",
    ]
)
USUAL = st.sampled_from(
    [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "x", "signature": ""},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
        {"name": "f", "input_schema": {}, "description": "x"},
    ]
)
BLOCK = USUAL | st.builds(
    lambda usual, kind, rest: {**usual, "type": kind, **rest},
    USUAL,
    KINDS | JSON,
    st.dictionaries(NAMES, JSON, max_size=2),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text(max_size=5) | st.lists(BLOCK, max_size=3) | JSON,
    }
)
REQUEST = st.dictionaries(NAMES, JSON | BLOCK | st.lists(BLOCK, max_size=2), max_size=5).flatmap(
    lambda body: st.lists(MESSAGE, max_size=3).map(lambda messages: {"max_tokens": 5, **body, "messages": messages})
)


@settings(max_examples=300)
@given(st.sampled_from([DIALECT, CountTokensDialect()]), REQUEST | JSON)
def test_any_body(dialect, body) -> None:
    try:
        request = dialect.parse(body)
    except RequestError as error:
        assert error.param and error.message
        return
    assert isinstance(request, Request)
    orjson.dumps([request.messages, request.tools, request.asked])
    for message in request.messages:
        assert isinstance(message["content"], str) and message["role"] in ("system", "user", "assistant", "tool")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": user({"text": "x"})}, "messages[0].content[0]"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0]"),
        ({"messages": user({"type": "tool_use", "id": "1", "name": "f", "input": {}})}, "messages[0].content[0].type"),
        ({"messages": user({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})},
            "messages[0].content[0].content[0]",
        ),
        ({"messages": [*BODY["messages"], {"role": "assistant", "content": "The answer is"}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"thinking": "much"}, "thinking"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {}, "description": 1}]}, "tools[0].description"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)
def test_what_is_malformed_is_refused_by_name(change: dict, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**change)
    assert refused.value.param == param and param in refused.value.message


TOOLS = [{"name": name, "input_schema": {"type": "object"}, "cache_control": {}} for name in ("f", "g")]


def test_tool_choice() -> None:
    assert parse(tools=TOOLS).must_call == ()
    forced = parse(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert (forced.must_call, forced.one_call, forced.calls_tools) == (("f", "g"), True, True)
    assert parse(tools=TOOLS, tool_choice={"type": "tool", "name": "g"}).must_call == ("g",)
    off = parse(tools=TOOLS, tool_choice={"type": "none"})
    assert not off.calls_tools and len(off.tools) == 2
    assert off.tools[0] == {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_schema() -> None:
    schema = {"type": "object", "properties": {}}
    for form in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                 {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
        request = parse(**form)
        assert request.schema == schema and request.constrained_by == request.schema_field in (
            "output_config.format",
            "output_format",
        )
    assert parse(output_config={"effort": "low", "format": None}).schema is None


def test_results_come_first_then_what_the_user_says() -> None:
    blocks = (
        {"type": "text", "text": "look"},
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "tool_result", "tool_use_id": "3", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"type": "text", "text": "well?"},
    )
    assert parse(messages=user(*blocks)).messages == [
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "Error"},
        {"role": "tool", "tool_call_id": "3", "content": "a\nb"},
        {"role": "user", "content": "look\nwell?"},
    ]
    only = parse(messages=user(blocks[1])).messages
    assert [message["role"] for message in only] == ["tool"]


def test_what_is_meant_for_the_bill_stays_out_of_the_prompt() -> None:
    blocks = [f"x-anthropic-billing-header: cc_version=2; cch={number};" for number in range(2)]
    one, two = (parse(system=[{"type": "text", "text": text} for text in (bill, "be brief")]) for bill in blocks)
    assert one.messages == two.messages == [{"role": "system", "content": "be brief"}, *BODY["messages"]]


# what comes out


def events(data: bytes) -> Iterator[dict]:
    """The events of a stream; each is one that the API has, with all that it needs and nothing else."""
    for part in data.decode().split("\n\n"):
        if not part:
            continue
        name, line = part.split("\n")
        event = orjson.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            for adapter in (EVENT, BETA_EVENT):
                assert_known(adapter.validate_python(event, strict=True))
        yield event


def assert_known(model: ApiModel) -> None:
    assert not model.model_extra, f"{type(model).__name__} has no {model.model_extra}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ApiModel):
                assert_known(one)


def outcome(reply: Reply, finish: Any = "stop", stop: str = "") -> Outcome:
    return Outcome([Choice(0, reply, finish, stop=stop)], 7, 3)


TEXTS = st.text(min_size=1, max_size=5)
ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", '{"a": "x\\n', '{"a": oops}', "[1]", ""])
PART = st.one_of(
    st.builds(lambda text: [Text(text)], TEXTS),
    st.builds(lambda text: [Reasoning(text)], TEXTS),
    st.builds(
        lambda text, cut: [ToolArguments(0, text[:cut]), ToolArguments(0, text[cut:])], ARGUMENTS, st.integers(0, 8)
    ),
)


def numbered(parts: list[list[Piece]]) -> list[Piece]:
    pieces: list[Piece] = []
    count = 0
    for part in parts:
        if isinstance(part[0], ToolArguments):
            pieces.append(ToolStart(count, f"call_{count}", "f"))
            pieces += [ToolArguments(count, one.text) for one in part]
            count += 1
        else:
            pieces += part
    return pieces


@settings(max_examples=300)
@given(st.lists(PART, max_size=6).map(numbered), st.sampled_from(["stop", "length"]), st.sampled_from(["", "END"]))
def test_stream_and_body_say_the_same(pieces: list[Piece], finish: Any, stop: str) -> None:
    reply = Reply()
    reply.add(pieces)
    if finish == "stop" and reply.tool_calls:
        finish = "tool_calls"
    ended = outcome(reply, finish, stop)
    request = Request(prompt_tokens=7)
    writer = DIALECT.writer(request, "m")
    data = writer.open() + b"".join(writer.pieces(0, [piece], ()) + writer.keep_alive() for piece in pieces)
    seen = [event for event in events(data + writer.close(ended)) if event["type"] != "ping"]
    body = orjson.loads(DIALECT.writer(request, "m").body(ended))
    for kind in (Message, BetaMessage):
        assert_known(kind.model_validate(body, strict=True))

    assert [seen[0]["type"], seen[-2]["type"], seen[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    assert seen[0]["message"]["usage"]["input_tokens"] == 7 == seen[-2]["usage"]["input_tokens"]
    assert seen[-2]["delta"] == {key: body[key] for key in ("stop_reason", "stop_sequence")}
    assert seen[-2]["usage"] == body["usage"] and body["usage"]["output_tokens"] == 3
    blocks: list[dict] = []
    open_block = False
    for event in seen[1:-2]:
        if event["type"] == "content_block_start":
            assert not open_block and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "partial": ""})
        else:
            assert open_block and event["index"] == len(blocks) - 1
        open_block = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type").removesuffix("_delta")
            assert blocks[-1]["type"] == {"input_json": "tool_use", "signature": "thinking"}.get(kind, kind)
            ((name, text),) = delta.items()
            blocks[-1][name.removesuffix("_json")] += text
    assert not open_block and blocks

    def joined(some: list[dict], kind: str) -> str:
        return "".join(block[kind] for block in some if block["type"] == kind)

    assert joined(blocks, "text") == joined(body["content"], "text") == reply.text
    assert joined(blocks, "thinking") == joined(body["content"], "thinking") == reply.reasoning
    assert all(block["signature"] for block in [*blocks, *body["content"]] if block["type"] == "thinking")
    streamed = [block for block in blocks if block["type"] == "tool_use"]
    whole = [block for block in body["content"] if block["type"] == "tool_use"]
    assert [(one["id"], one["name"]) for one in streamed] == [(one["id"], one["name"]) for one in whole]
    for part, block, call in zip(streamed, whole, reply.tool_calls, strict=True):
        if set(block["input"]) == {"INVALID_JSON"}:
            assert block["input"] == {"INVALID_JSON": call["arguments"]} and call["arguments"].startswith(
                part["partial"]
            )
        else:
            assert orjson.loads(part["partial"] or "{}") == block["input"]

    # And back: it is the message that was recorded, up to how the arguments are written.
    said = DIALECT.parse({**BODY, "messages": [{"role": "assistant", "content": body["content"]}, *BODY["messages"]]})
    again, recorded = said.messages[0], reply.message()
    for call in (*again.pop("tool_calls", ()), *recorded.pop("tool_calls", ())):
        assert call["id"].startswith("call_")
    assert again == recorded


@pytest.mark.parametrize(
    ("reply", "finish", "stop", "expected"),
    [
        (Reply("a"), "stop", "", ("end_turn", None)),
        (Reply("a"), "length", "", ("max_tokens", None)),
        (Reply("a"), "stop", "END", ("stop_sequence", "END")),
        (Reply(tool_calls=[{"id": "1", "name": "f", "arguments": "{}"}]), "tool_calls", "", ("tool_use", None)),
        (Reply(tool_calls=[{"id": "1", "name": "f", "arguments": "{}"}]), "tool_calls", "END", ("tool_use", None)),
        (
            Reply(tool_calls=[{"id": "1", "name": "f", "arguments": '{"a'}]),
            "tool_calls",
            "END",
            ("stop_sequence", "END"),
        ),
    ],
)
def test_stop_reasons(reply: Reply, finish: Any, stop: str, expected: tuple) -> None:
    body = orjson.loads(DIALECT.writer(Request(), "m").body(outcome(reply, finish, stop)))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("invalid", "invalid_request_error"),
        ("method", "invalid_request_error"),
        ("context_length", "invalid_request_error"),
        ("auth", "authentication_error"),
        ("ended", "authentication_error"),
        ("not_found", "not_found_error"),
        ("limit", "permission_error"),
        ("held", "overloaded_error"),
        ("engine", "api_error"),
        ("store", "api_error"),
    ],
)
def test_errors_have_the_shape_of_the_api(kind: Any, name: str) -> None:
    problem = Problem(400, kind, "what is wrong", "field")
    assert_known(ErrorResponse.model_validate_json(DIALECT.error(problem), strict=True))
    assert orjson.loads(DIALECT.error(problem))["error"] == {"type": name, "message": "what is wrong"}
    (event,) = events(DIALECT.writer(Request(), "m").error(problem))
    assert event["type"] == "error" and event["error"]["type"] == name
    coded = orjson.loads(DIALECT.error(Problem(403, "limit", "no more", code="rollout_limit_calls")))
    assert coded["error"]["details"] == {"error_code": "rollout_limit_calls"}


def test_counts_and_models_have_the_shape_of_the_api() -> None:
    count = MessageTokensCount.model_validate_json(CountTokensDialect().count(5), strict=True)
    assert count.input_tokens == 5
    assert_known(ModelInfo.model_validate_json(models_body("tiny", 40, one=True), strict=True))
