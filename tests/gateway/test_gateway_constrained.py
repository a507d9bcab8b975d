"""What a reply must be: forced tool calls, JSON replies, most probable tokens. The engine is a scripted one; that a
real one obeys is tested with it (tests/engine/test_constrained.py, tests/worker/test_constrained_sdk.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from staging import Stage, running
from test_gateway_text import QWEN3_MARKERS
from tiny import TEMPLATE, tiny_model

from aglite.engine.scripted import ScriptedEngine, logprob_of
from aglite.gateway.renderers import load_renderer

SAY: Any = [{"role": "user", "content": "say hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
    {"type": "web_search"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def constrain(stage: Stage, *replies: dict) -> None:
    script = {"constrains": True, "replies": list(replies)}
    stage.gateway.engine = stage.engine = ScriptedEngine(stage.renderer.tokenizer, script)


def grammar(stage: Stage) -> Any:
    sent = stage.engine.requests[-1].grammar
    return None if sent is None else json.loads(sent)["format"]


def arguments(schema: dict) -> dict:
    schema = {**schema, "type": "object", "x-guidance": {"lenient": True}}
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 32}


def text(value: str) -> dict:
    return {"type": "const_string", "value": value}


def block(name: str, schema: dict) -> dict:
    head = text(f'\n{{"name": "{name}", "arguments": ')
    return {
        "type": "sequence",
        "elements": [text("<tool_call>"), head, arguments(schema), text("}\n"), text("</tool_call>")],
    }


WEATHER, STOP = block("weather", CITY), block("stop", {})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_call(stage: Stage, stream: bool) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    create = stage.client(session).chat.completions.create
    reply = await create(
        model="m", messages=SAY, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream
    )
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in reply]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert calls[0].name == "weather" and "".join(call.arguments for call in calls) == '{"city": "Paris"}'
        assert not any(delta.content for delta in deltas)
    else:
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert grammar(stage) == WEATHER
    (recorded,) = stage.calls(session)
    assert recorded.constrained and recorded.json()["constrained"] is True
    assert recorded.request["asked"]["tool_choice"] == choice


async def test_a_required_call_may_be_of_any_tool_and_several(stage: Stage) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    create = stage.client(session).chat.completions.create
    await create(model="m", messages=SAY, tools=TOOLS, tool_choice="required")
    either = {"type": "or", "elements": [WEATHER, STOP]}
    more = {"type": "star", "content": {"type": "sequence", "elements": [text("\n"), either]}}
    assert grammar(stage) == {"type": "sequence", "elements": [either, more]}
    await create(model="m", messages=SAY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert grammar(stage) == either


async def test_allowed_tools(stage: Stage) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    create = stage.client(session).chat.completions.create
    allowed = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
    for mode, expected in (("auto", None), ("required", WEATHER)):
        choice: Any = {"type": "allowed_tools", "allowed_tools": {**allowed, "mode": mode}}
        await create(model="m", messages=SAY, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert grammar(stage) == expected
        prompt = stage.renderer.tokenizer.decode(stage.engine.sent[-1][0])
        assert '"weather"' in prompt and '"stop"' not in prompt, "the model is told of what it may call"


async def test_free_choices_stay_free(stage: Stage) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    create = stage.client(session).chat.completions.create
    for choice, content in ((None, None), ("auto", None), ("none", CALL)):
        extra: Any = {} if choice is None else {"tool_choice": choice}
        reply = await create(model="m", messages=SAY, tools=TOOLS, response_format={"type": "text"}, **extra)
        assert reply.choices[0].message.content == content
        assert grammar(stage) is None
    assert not any(call.constrained for call in stage.calls(session))


async def test_json_replies(stage: Stage) -> None:
    class City(BaseModel):
        city: str

    constrain(stage, {"text": '{"city": "Paris"}'})
    session = await stage.session()
    client = stage.client(session)
    parsed = await client.chat.completions.parse(model="m", messages=SAY, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Paris")
    form = grammar(stage)
    assert form["type"] == "json_schema" and "x-guidance" not in form["json_schema"], "strict: enforced or refused"
    assert form["json_schema"]["properties"] == {"city": {"title": "City", "type": "string"}}
    async with client.chat.completions.stream(model="m", messages=SAY, response_format=City) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == City(city="Paris")
    await client.chat.completions.create(model="m", messages=SAY, response_format={"type": "json_object"})
    assert grammar(stage) == arguments({})
    assert [call.request["asked"]["response_format"] for call in stage.calls(session)] == [
        "json_schema", "json_schema", "json_object",
    ]  # fmt: skip


async def test_a_schema_or_a_call(stage: Stage) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}
    create = stage.client(session).chat.completions.create
    await create(model="m", messages=SAY, tools=TOOLS[:1], response_format=form, parallel_tool_calls=False)
    assert grammar(stage) == {"type": "or", "elements": [arguments(CITY), WEATHER]}
    await create(model="m", messages=SAY, tools=TOOLS[:1], response_format=form, tool_choice="none")
    assert grammar(stage) == arguments(CITY)


FORCED: Any = {"tools": TOOLS, "tool_choice": "required"}
FORMED: Any = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(("ask", "param"), [(FORCED, "tool_choice"), (FORMED, "response_format")])
async def test_an_engine_that_cannot(stage: Stage, ask: dict, param: str) -> None:
    session = await stage.session()
    with pytest.raises(openai.BadRequestError) as refused:
        await stage.client(session).chat.completions.create(model="m", messages=SAY, **ask)
    assert refused.value.param == param and refused.value.code == "unsupported_value"
    assert param in str(refused.value) and not stage.engine.requests


@pytest.mark.parametrize(("ask", "param"), [(FORCED, "tools"), (FORMED, "response_format")])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_schema_that_the_engine_cannot_enforce(stage: Stage, ask: dict, param: str, n: int) -> None:
    constrain(stage, {"grammar_error": "no such keyword"})
    session = await stage.session()
    with pytest.raises(openai.BadRequestError) as refused:
        await stage.client(session).chat.completions.create(model="m", messages=SAY, n=n, **ask)
    assert refused.value.param == param and "no such keyword" in str(refused.value)
    assert session.infra_error is None, "the agent's fault, not ours"


async def test_tools_that_cannot_be_forced(stage: Stage) -> None:
    constrain(stage, {"text": CALL})
    session = await stage.session()
    deep: dict = {}
    for _ in range(120):
        deep = {"items": deep}
    for tools in ([], [{"type": "web_search"}], [{"type": "function", "function": {"name": "f", "parameters": deep}}]):
        with pytest.raises(openai.BadRequestError) as refused:
            await stage.client(session).chat.completions.create(
                model="m", messages=SAY, tools=tools, tool_choice="required"
            )
        assert refused.value.param in ("tool_choice", "the parameters of tool 'f'")


def family(folder: Path, kind: str) -> Any:
    """A renderer of the package on a tiny tokenizer."""
    start = TEMPLATE.index("{% if loop.first")
    template = TEMPLATE[:start] + TEMPLATE[TEMPLATE.index("{% endif %}", start) + len("{% endif %}") :]
    return load_renderer(
        tiny_model(folder / kind, markers=QWEN3_MARKERS, template=template, config={"model_type": kind})
    )


async def test_a_family_that_reasons(tmp_path: Path) -> None:
    renderer = family(tmp_path, "qwen3")
    token = renderer.tokenizer.token_id
    async with running(tmp_path, renderer) as stage:
        constrain(stage, {"text": f"<think>\nhm\n</think>\n\n{CALL}"})
        session = await stage.session()
        reply = await stage.client(session).chat.completions.create(
            model="m", messages=SAY, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "weather" and reply.choices[0].message.reasoning_content == "hm"
        thinking, calling = grammar(stage)["elements"]
        assert thinking["type"] == "optional"
        opening, thoughts, closing, _ = thinking["content"]["elements"]
        assert (opening["token"], closing["token"]) == (token("<think>"), token("</think>"))
        assert set(thoughts["exclude_tokens"]) == {token("<think>"), token("</think>"), *renderer.stop_ids}
        ends = [calling["elements"][0], calling["elements"][-1]]
        assert ends == [{"type": "token", "token": "<tool_call>"}, {"type": "token", "token": "</tool_call>"}]


async def test_most_probable_tokens(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello world"}], "tokens_per_chunk": 2}
    session = await stage.session()
    client = stage.client(session)
    ask: Any = {"model": "m", "messages": SAY, "logprobs": True, "top_logprobs": 3}
    reply = await client.chat.completions.create(**ask)
    content = reply.choices[0].logprobs.content
    prompt, ids, logprobs, _ = stage.engine.sent[0]
    assert [one.logprob for one in content] == logprobs
    for at, (one, token) in enumerate(zip(content, ids, strict=True)):
        candidates = [logprob_of(other, len(prompt) + at) for other in range(token, token + 4)]
        assert [top.logprob for top in one.top_logprobs] == sorted(candidates, reverse=True)[:3]
        assert all(bytes(top.bytes).decode(errors="replace") == top.token for top in one.top_logprobs)
    streamed = [
        one
        async for chunk in await client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    assert streamed == content
    ask["top_logprobs"] = 0
    reply = await client.chat.completions.create(**ask)
    assert all(one.top_logprobs == [] for one in reply.choices[0].logprobs.content)
    assert [params.top_logprobs for params in stage.engine.requests] == [3, 3, 0]


async def test_most_probable_tokens_of_a_text_completion(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello world"}]}
    session = await stage.session()
    reply = await stage.client(session).completions.create(model="m", prompt="Say:", logprobs=2)
    shown = reply.choices[0].logprobs
    prompt, ids, logprobs, _ = stage.engine.sent[0]
    assert shown.token_logprobs == logprobs
    for at, places in enumerate(shown.top_logprobs):
        candidates = {logprob_of(other, len(prompt) + at) for other in range(ids[at], ids[at] + 3)}
        best = sorted(candidates, reverse=True)[:2]
        assert places[shown.tokens[at]] == logprobs[at], "the sampled one is always among them"
        assert set(places.values()) <= {*best, logprobs[at]}
