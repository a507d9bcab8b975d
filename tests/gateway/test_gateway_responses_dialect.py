"""Requests of the Responses API: anything goes in, a request or a named error comes out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aglite.gateway.dialects.base import Choice, Outcome, Request, RequestError
from aglite.gateway.dialects.responses import ResponsesDialect
from aglite.gateway.dialects.responses_items import messages_of
from aglite.gateway.replies import Reply

DIALECT = ResponsesDialect()
TOOLS = [
    {"type": "function", "name": "shell", "description": "run", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "edit", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__db__", "description": "the database", "tools": [
        {"type": "function", "name": "query", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"}]},
]  # fmt: skip
BODY = {"model": "m", "input": "hello", "tools": TOOLS}


LEAVES = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=6)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
FIELDS = """model input instructions tools tool_choice stream stream_options max_output_tokens temperature
max_tool_calls top_p top_logprobs include reasoning text format metadata previous_response_id store truncation
background conversation prompt parallel_tool_calls user prompt_cache_key"""
TYPES = """message function_call function_call_output custom_tool_call custom_tool_call_output reasoning item_reference
web_search_call input_text output_text refusal agent_message additional_tools input_image
summary_text reasoning_text function custom namespace
web_search grammar allowed_tools json_schema"""
NAMES, KINDS = st.sampled_from(FIELDS.split()), st.sampled_from(TYPES.split())
PARTS = st.lists(st.fixed_dictionaries({"type": KINDS | JSON, "text": st.text(max_size=4) | JSON}), max_size=3)
ITEM = st.fixed_dictionaries(
    {"type": KINDS | JSON},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON,
        "content": PARTS | JSON,
        "output": PARTS | JSON,
        "summary": PARTS | JSON,
        "encrypted_content": JSON | st.just("aglite:&"),
        "id": JSON | st.just("msg_" + "0" * 34),
        "call_id": JSON,
        "name": st.text(max_size=3) | JSON,
        "namespace": JSON,
        "arguments": JSON,
        "input": JSON,
        "tools": st.lists(JSON, max_size=2),
        "parameters": JSON,
        "format": JSON,
        "mode": JSON,
        "schema": JSON,
    },
)
ANY_BODY = st.dictionaries(NAMES, JSON | ITEM | st.lists(ITEM, max_size=4))
LIKELY_BODY = st.builds(
    lambda body, items, tools: {**body, "input": items, "tools": tools},
    st.dictionaries(NAMES, JSON | ITEM, max_size=2),
    st.lists(ITEM, max_size=5),
    st.lists(ITEM, max_size=3) | st.just(TOOLS),
)


@settings(max_examples=120)
@given(ANY_BODY | LIKELY_BODY | JSON)
def test_any_body(body: Any) -> None:
    try:
        request = DIALECT.parse(body)
    except RequestError as error:
        assert error.param and error.message
        return
    assert isinstance(request, Request)
    body = orjson.loads(DIALECT.writer(request, "m").body(Outcome([Choice(0, Reply("hi"), "stop")], 1, 1)))
    assert body["output"][0]["content"][0]["text"] == "hi"
    orjson.dumps([request.messages, request.tools, request.asked, request.schema], option=orjson.OPT_NON_STR_KEYS)
    for message in request.messages:
        assert isinstance(message["content"], str) and message["role"] in ("system", "user", "assistant", "tool")
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], str) and call["function"]["name"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": []}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": 1, "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_other"}]}, "input[0].id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "aglite:?"}]},
         "input[0].encrypted_content"),
        ({"tools": "all"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]}, "tools[0].format"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [{"name": "shell"}]}}, "tool_choice.mode"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "all"}, "include"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"stream": "yes"}, "stream"),
        ({"previous_response_id": 1}, "previous_response_id"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_name(change: dict, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        DIALECT.parse({**BODY, **change})
    assert refused.value.param == param


def test_what_is_asked_for_is_understood() -> None:
    request = DIALECT.parse(
        {
            **BODY,
            "tools": [*TOOLS, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}],
            "instructions": "be brief",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
                {"role": "user", "content": "hi"},
            ],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 50,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}, "verbosity": "low"},
            "reasoning": {"effort": "high", "summary": "auto"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 2,
            "temperature": 0.5,
            "store": False,
            "max_tool_calls": 4,
            "client_metadata": {"x": 1},
            "unheard_of": [1],
        }
    )
    assert [message["role"] for message in request.messages] == ["system", "system", "user"]
    names = ("shell", "apply_patch", "mcp__db__query", "mcp__db__note")
    assert tuple(tool["function"]["name"] for tool in request.tools) == names == request.must_call
    patch = request.tools[1]["function"]["parameters"]
    assert patch["required"] == ["input"] and "start: /.+/" in patch["properties"]["input"]["description"]
    assert request.one_call and request.max_tokens == 50 and request.schema == {"type": "array"}
    assert request.logprobs and request.top_logprobs == 2 and not request.nameable
    asked = request.asked
    assert (asked["reasoning_effort"], asked["temperature"], asked["max_tool_calls"]) == ("high", 0.5, 4)
    assert asked["tools_left_out"] == ["web_search", "mcp"]


@pytest.mark.parametrize(
    ("choice", "calls", "must", "shown"),
    [
        ("auto", True, (), 4),
        ("none", False, (), 4),
        ({"type": "function", "name": "query"}, True, ("mcp__db__query",), 4),
        ({"type": "custom", "name": "apply_patch"}, True, ("apply_patch",), 4),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]}, True, (), 1),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "shell"}]}, True, ("shell",), 4),
    ],
)
def test_tool_choice(choice: Any, calls: bool, must: tuple, shown: int) -> None:
    request = DIALECT.parse({**BODY, "tool_choice": choice})
    assert (request.calls_tools, request.must_call, len(request.tools)) == (calls, must, shown)


def test_replies_that_follow_each_other_stay_apart() -> None:
    """A stream that broke leaves its finished items in the history; the next reply follows them directly."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    call = {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}

    def shape(*items: dict) -> list[tuple]:
        return [
            (m.get("reasoning_content", ""), m["content"], len(m.get("tool_calls", ())))
            for m in messages_of(list(items))
        ]

    assert shape(reasoning, message, call, call, message) == [("r", "aa", 2)]
    assert shape(message, message) == [("", "a", 0), ("", "a", 0)]
    assert shape(message, reasoning, call) == [("", "a", 0), ("r", "", 1)]
    one, two = f"msg_{'1' * 32}00", f"fc_{'2' * 32}00"
    assert shape({**message, "id": one}, {**call, "id": two}) == [("", "a", 0), ("", "", 1)]
    assert shape({**message, "id": one}, {**message, "id": one[:-1] + "2"}) == [("", "aa", 0)]
    foreign = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAA"}
    assert shape(foreign, message) == [("", "a", 0)]


def test_tools_and_messages_that_come_as_items() -> None:
    """So does Codex give the tools of newer models, and a sub-agent its task."""
    exec_ = {"type": "custom", "name": "exec", "description": "run"}
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "description": "", "tools": [exec_]}, {"type": "mcp"}],
    }
    parts = [
        {"type": "input_text", "text": "Message Type: NEW_TASK\n"},
        {"type": "encrypted_content", "encrypted_content": "do it"},
    ]
    called = {"type": "custom_tool_call", "call_id": "1", "namespace": "functions", "name": "exec", "input": "x"}
    message = {"type": "agent_message", "author": "/root", "recipient": "/root/sub", "content": parts}
    request = DIALECT.parse({"model": "m", "input": [added, called, message]})
    assert [tool["function"]["name"] for tool in request.tools] == ["exec"]
    assert request.memo.origins["exec"] == ("custom", "exec", "functions")
    assert request.asked["tools_left_out"] == ["mcp"]
    assert request.messages[0]["tool_calls"][0]["function"] == {"name": "exec", "arguments": '{"input":"x"}'}
    assert request.messages[1:] == [{"role": "user", "content": "Message Type: NEW_TASK\ndo it"}]
    with pytest.raises(RequestError) as refused:
        DIALECT.parse({"model": "m", "input": [{**added, "tools": [{"type": "custom"}]}, message]})
    assert refused.value.param == "input[0].tools[0].name"
