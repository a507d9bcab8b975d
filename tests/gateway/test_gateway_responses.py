"""The Responses API through the official SDK on a real socket, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from staging import Stage, running
from test_gateway_chat import assert_exact
from test_gateway_text import QWEN3_MARKERS
from tiny import TEMPLATE, tiny_model

from aglite.config import Limits
from aglite.gateway.renderers import load_renderer

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edit files"}
FILES = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "files",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}
TOOLS: list[Any] = [WEATHER, PATCH, FILES, {"type": "web_search"}]


def call(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


async def test_a_reply_and_its_record(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello wörld ✓"}]}
    session = await stage.session()
    reply = await stage.client(session).responses.create(
        model="any", instructions="be brief", input="say hello", temperature=0.1, metadata={"task": "7"}
    )
    assert reply.output_text == "hello wörld ✓" and reply.status == "completed" and reply.model == "any"
    assert reply.metadata == {"task": "7"} and reply.instructions == "be brief"
    await stage.gateway.deliveries.flush()
    (record,) = stage.calls(session)
    assert_exact(stage, session)
    assert (record.dialect, record.delivered, record.finish_reason) == ("responses", True, "stop")
    assert reply.usage.input_tokens == len(record.prompt_ids)
    assert reply.usage.output_tokens == len(record.response_ids)
    assert record.request["used"]["temperature"] == 0.7, "the recipe's sampling holds"
    assert stage.store.messages(record) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say hello"},
    ]


async def test_a_stream_comes_token_by_token(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "one two three ünïcode"}], "latency_s": 0.02}
    session = await stage.session()
    loop = asyncio.get_running_loop()
    times, text = [], ""
    async with stage.client(session).responses.stream(model="m", input="go") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                times.append(loop.time())
                text += event.delta
                assert event.snapshot == text
        final = await stream.get_final_response()
    assert text == final.output_text == "one two three ünïcode"
    assert len(times) > 5 and times[-1] - times[0] > 0.1, "pieces are spread over the time of sampling"
    assert final.usage.output_tokens == len(stage.engine.sent[0][1])
    await stage.gateway.deliveries.flush()
    assert stage.calls(session)[0].delivered
    assert_exact(stage, session)


async def test_a_loop_with_tools(stage: Stage) -> None:
    """Parallel calls of all kinds, streamed; the items go back as the SDK has them."""
    sampled = [call("weather", '{"city" : "Paris"}'), call("apply_patch", {"input": '*** é\n+"x"'})]
    text = "let me look\n" + "\n".join([*sampled, call("mcp__files__read", {"path": "a"})])
    stage.engine.script = {"replies": [{"texts": [text, "It is sunny"]}]}
    session = await stage.session()
    client = stage.client(session)
    items: list[Any] = [{"role": "user", "content": "go"}]
    async with client.responses.stream(model="m", input=items, tools=TOOLS) as stream:
        events = [event async for event in stream]
        first = await stream.get_final_response()
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 6
    assert sum(event.type == "response.custom_tool_call_input.delta" for event in events) > 3
    message, weather, patch, read = first.output
    assert message.content[0].text == "let me look"
    assert (weather.name, weather.arguments) == ("weather", '{"city" : "Paris"}')
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", '*** é\n+"x"')
    assert (read.namespace, read.name) == ("mcp__files__", "read")
    prompt = stage.renderer.tokenizer.decode(stage.engine.sent[0][0])
    assert '"name":"mcp__files__read"' in prompt and "web_search" not in prompt
    assert stage.calls(session)[0].request["asked"]["tools_left_out"] == ["web_search"]
    items += [item.to_dict() for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": weather.call_id, "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        {"type": "function_call_output", "call_id": read.call_id, "output": [{"type": "input_text", "text": "b"}]},
    ]
    second = await client.responses.create(model="m", input=items, tools=TOOLS)
    assert second.output_text == "It is sunny"
    calls = stage.calls(session)
    assert calls[1].fork_cause == "" and calls[1].parent_id == calls[0].id
    assert "<tool_response>\nsunny" in stage.renderer.tokenizer.decode(stage.engine.sent[1][0])
    assert_exact(stage, session)


def careless(items: list[dict], rng: random.Random) -> list[dict]:
    """What a harness may do to the items of a reply before it sends them back."""
    back = []
    strips, drops, turns = rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.5
    for item in items:
        item = {name: value for name, value in item.items() if not (strips and name in ("id", "status"))}
        if item["type"] == "reasoning" and drops:
            continue
        if item["type"] == "function_call" and turns:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), indent=2)
        back.append(item)
    return back


@pytest.mark.parametrize("family", ["chatml", "qwen3"])
async def test_every_turn_that_appends_continues_the_recorded_tokens(family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if family == "qwen3":
        start = TEMPLATE.index("{% if loop.first")
        template = TEMPLATE[:start] + TEMPLATE[TEMPLATE.index("{% endif %}", start) + len("{% endif %}") :]
        options = {"markers": QWEN3_MARKERS, "template": template, "config": {"model_type": "qwen3"}}
    renderer = load_renderer(tiny_model(tmp_path / "m", **options))
    assert renderer.family == family
    rng = random.Random(3)
    texts = []
    for turn in range(24):
        text = f"<think>\nI think of {turn}\n</think>\n\n" if turn % 3 else ""
        if turn % 2:
            text += f"Answer {turn} \n and more"
        else:
            text += f"look {turn}\n" + call("weather", f'{{"city" : "{turn}"}}')
            text += "\n" + call("apply_patch", rng.choice([f'{{"input": "a\\n{turn}"}}', f'{{"patch": "{turn}"}}']))
        texts.append(text)
    async with running(tmp_path, renderer, context_length=20000) as stage:
        stage.engine.script = {"replies": [{"texts": texts}], "tokens_per_chunk": 3}
        session = await stage.session()
        client = stage.client(session)
        items: list[Any] = [{"role": "user", "content": "start"}]
        for turn in range(24):
            options = {"model": "m", "instructions": "be", "input": items, "tools": TOOLS}
            if turn % 4 < 2:
                async with client.responses.stream(**options) as stream:
                    reply = await stream.get_final_response()
            else:
                reply = await client.responses.create(**options)
            output = [item.to_dict() for item in reply.output]
            items = items + careless(output, rng)
            for item in output:
                if item["type"].endswith("_call"):
                    items.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"})
            if turn % 2:
                items.append({"role": "user", "content": f"more {turn}"})
        calls = stage.calls(session)
        assert [record.fork_cause for record in calls] == ["first", *[""] * 23]
        for before, after in pairwise(calls):
            known = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(known)] == known
        assert_exact(stage, session)


async def test_what_codex_sends(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "<think>\nhm\n</think>\n\nok"}]}
    session = await stage.session()
    reply = await stage.client(session).responses.create(
        model="gpt-5-codex",
        instructions="You are a coding agent",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "skills"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "task"}]},
        ],
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        extra_body={"client_metadata": {"x": "y"}},
    )
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "hm" and reply.output[0].encrypted_content
    assert reply.usage.output_tokens_details.reasoning_tokens > 2
    (record,) = stage.calls(session)
    roles = [message["role"] for message in stage.store.messages(record)]
    assert roles == ["system", "system", "system", "user"]
    with pytest.raises(openai.NotFoundError):
        await stage.client(session).responses.retrieve(reply.id)


async def test_an_answer_cut_short_is_incomplete(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "one two three four"}]}
    session = await stage.session()
    client = stage.client(session)
    reply = await client.responses.create(model="m", input="go", max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete" and reply.usage.output_tokens == 3
    events = [
        event async for event in await client.responses.create(model="m", input="go", max_output_tokens=3, stream=True)
    ]
    assert events[-1].type == "response.incomplete"


async def test_log_probabilities(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello ✓"}]}
    session = await stage.session()
    options: dict[str, Any] = {"model": "m", "input": "go", "include": ["message.output_text.logprobs"]}
    reply = await stage.client(session).responses.create(**options)
    logprobs = reply.output[0].content[0].logprobs
    assert [one.logprob for one in logprobs] == stage.engine.sent[0][2][:-1]
    assert bytes(byte for one in logprobs for byte in one.bytes).decode() == "hello ✓"
    async with stage.client(session).responses.stream(**options) as stream:
        told = [
            one.logprob
            async for event in stream
            if event.type == "response.output_text.delta"
            for one in event.logprobs
        ]
    assert told == stage.engine.sent[1][2][:-1]


class City(pydantic.BaseModel):
    name: str
    people: int


async def test_structured_output(stage: Stage) -> None:
    stage.engine.info.constrains = True
    stage.engine.script = {"replies": [{"text": '{"name": "Paris", "people": 2}'}]}
    session = await stage.session()
    reply = await stage.client(session).responses.parse(model="m", input="a city", text_format=City)
    assert reply.output_parsed == City(name="Paris", people=2)
    async with stage.client(session).responses.stream(model="m", input="a city", text_format=City) as stream:
        assert (await stream.get_final_response()).output_parsed == City(name="Paris", people=2)


def test_sync_client(tmp_path: Path, renderer) -> None:
    """The blocking SDK from another thread, as agents use it."""

    async def main() -> None:
        async with running(tmp_path, renderer) as stage:
            stage.engine.script = {"replies": [{"text": "hello"}]}
            session = await stage.session()

            def talk() -> list[str]:
                client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key=session.token, max_retries=0)
                plain = client.responses.create(model="m", input="say hello")
                with client.responses.stream(model="m", input="say hello") as stream:
                    final = stream.get_final_response()
                deltas = client.responses.create(model="m", input="say hello", stream=True)
                text = "".join(event.delta for event in deltas if event.type == "response.output_text.delta")
                return [plain.output_text, final.output_text, text, client.responses.retrieve(plain.id).output_text]

            assert await asyncio.to_thread(talk) == ["hello"] * 4

    asyncio.run(main())


# errors


async def test_errors_have_the_shape_of_the_api(tmp_path: Path, renderer) -> None:
    async with running(tmp_path, renderer, context_length=64) as stage:
        session = await stage.session()
        client = stage.client(session)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="word " * 100, stream=True)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
        with pytest.raises(openai.BadRequestError, match="input_image") as refused:
            picture: Any = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
            await client.responses.create(model="m", input=[{"role": "user", "content": [picture]}])
        assert refused.value.param == "input[0].content[0]"
        with pytest.raises(openai.AuthenticationError):
            await stage.client(session).with_options(api_key="nonsense").responses.create(model="m", input="x")
        limited = await stage.session("r-2", limits=Limits(calls=1, sampled_tokens=100))
        await stage.client(limited).responses.create(model="m", input="x")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await stage.client(limited).responses.create(model="m", input="x")
        assert refused.value.code == "rollout_limit_calls"
        stage.engine.failure = "the worker died"
        with pytest.raises(openai.InternalServerError, match="the worker died"):
            await client.responses.create(model="m", input="x", stream=True)


async def test_a_stream_that_breaks_ends_in_a_failed_response(stage: Stage) -> None:
    stage.engine.script = {"latency_s": 0.01, "length": 50}
    session = await stage.session()
    events = []
    async for event in await stage.client(session).responses.create(model="m", input="x", stream=True):
        events.append(event)
        if len(events) == 10:
            stage.engine.failure = "it died"
    assert events[-1].type == "response.failed" and "it died" in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (record,) = stage.calls(session)
    assert record.status == "error"


async def test_a_silent_stream_is_kept_alive_by_real_events(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr("aglite.gateway.gateway.KEEPALIVE_S", 0.05)
    stage.gateway.gate.max_hold_s = 0.2
    stage.engine.script = {"replies": [{"text": "hello big world"}], "prefill_s": 0.5}
    session = await stage.session()
    async with stage.client(session).responses.stream(model="m", input="x") as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_response()).output_text == "hello big world"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events].count("response.in_progress") >= 3
