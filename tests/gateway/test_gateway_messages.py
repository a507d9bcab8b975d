"""The Messages API as Anthropic's SDK sees it, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import anthropic
import httpx
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel
from staging import Stage, running
from test_gateway_chat import assert_exact

SAY = [{"role": "user", "content": "say hello"}]
WEATHER = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days" : 5.0, "city" : "Paris"}}\n</tool_call>'
ASK = {"model": "m", "max_tokens": 400}


def forks(stage: Stage, session) -> list[str]:
    calls = stage.calls(session)
    for before, after in pairwise(calls):
        if not after.fork_cause:
            known = (before.prompt_ids + before.response_ids).tolist()
            assert after.prompt_ids[: len(known)].tolist() == known
    return [call.fork_cause for call in calls]


async def test_a_reply_and_its_record(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello wörld ✓"}]}
    session = await stage.session()
    reply = await stage.anthropic(session).messages.create(
        **ASK,
        system="be brief",
        messages=SAY,
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        extra_body={"temperature": 0.1, "top_k": 5, "context_management": {"edits": []}},
    )
    assert [block.to_dict() for block in reply.content] == [{"type": "text", "text": "hello wörld ✓"}]
    assert (reply.stop_reason, reply.stop_sequence, reply.model, reply.role) == ("end_turn", None, "m", "assistant")
    await stage.gateway.deliveries.flush()
    (call,) = stage.calls(session)
    assert_exact(stage, session)
    assert (call.dialect, call.fork_cause, call.status, call.delivered) == ("messages", "first", "ok", True)
    assert reply.usage.input_tokens == len(call.prompt_ids)
    assert reply.usage.output_tokens == len(call.response_ids)
    asked = {"temperature": 0.1, "top_k": 5, "thinking": {"type": "adaptive"}, "effort": "low"}
    assert call.request["asked"].items() >= asked.items()
    assert call.request["used"]["temperature"] == 0.7, "the recipe's sampling holds"
    assert stage.store.messages(call) == [{"role": "system", "content": "be brief"}, *SAY]


async def test_a_stream_comes_token_by_token(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "one two three ünïcode"}], "latency_s": 0.02}
    session = await stage.session()
    loop = asyncio.get_running_loop()
    times, text = [], ""
    async with stage.anthropic(session).messages.stream(**ASK, messages=SAY) as stream:
        async for piece in stream.text_stream:
            times.append(loop.time())
            text += piece
        final = await stream.get_final_message()
    assert text == "one two three ünïcode" == final.content[0].text
    assert len(times) > 5 and times[-1] - times[0] > 0.1, "pieces are spread over the time of sampling"
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens == len(stage.engine.sent[0][0])
    assert final.usage.output_tokens == len(stage.engine.sent[0][1])
    await stage.gateway.deliveries.flush()
    assert stage.calls(session)[0].delivered


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_continues_the_recorded_tokens(stage: Stage, stream: bool) -> None:
    stage.engine.script = {
        "replies": [{"texts": [f"<think>\nhm\n</think>\n\nlet me look\n{CALL}\n{CALL}", "sunny", "bye"]}]
    }
    session = await stage.session()
    client = stage.anthropic(session)
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    messages: list = [
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]}
    ]

    async def turn():
        ask = {**ASK, "system": system, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return await client.messages.create(**ask)
        async with client.messages.stream(**ask) as events:
            return await events.get_final_message()

    first = await turn()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text) == ("hm", "let me look")
    assert first.content[0].signature
    assert first.content[2].input == {"days": 5.0, "city": "Paris"}
    assert first.content[2].id != first.content[3].id and first.stop_reason == "tool_use"
    # The marker of the cache moves, the thinking is dropped, the input is written by JavaScript, keys in another order.
    messages[0] = {"role": "user", "content": "go"}
    uses = [
        {"type": "tool_use", "id": block.id, "name": block.name, "input": {"city": "Paris", "days": 5}}
        for block in first.content[2:]
    ]
    results = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sun"}]} for use in uses
    ]
    messages.append({"role": "assistant", "content": [first.content[1].to_dict(), *uses]})
    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "so?"}]})
    second = await turn()
    assert second.content[0].text == "sunny"
    # All of it comes back, and a system message in the middle.
    messages[1] = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    messages.append({"role": "assistant", "content": "sunny"})
    messages.append({"role": "user", "content": "thanks"})
    messages.append({"role": "system", "content": "say goodbye"})
    await turn()
    assert forks(stage, session) == ["first", "", ""]
    assert_exact(stage, session)
    sent = stage.store.messages(stage.calls(session)[2])
    assert [message["role"] for message in sent] == [
        "system", "user", "assistant", "tool", "tool", "user", "assistant", "user", "system",
    ]  # fmt: skip
    assert sent[3]["content"] == "sun" and sent[3]["tool_call_id"] == uses[0]["id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"city": Paris}', {}), ('{"city": "Par", "days": 1,}', {"city": "Par", "days": 1})],
)
async def test_arguments_that_are_no_json(stage: Stage, stream: bool, arguments: str, seen: dict) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    stage.engine.script = {"replies": [{"texts": [call, "sorry"]}]}
    session = await stage.session()
    client = stage.anthropic(session)
    ask = {**ASK, "tools": [WEATHER]}
    if stream:
        async with client.messages.stream(**ask, messages=SAY) as events:
            first = await events.get_final_message()
        assert first.content[0].input == seen
    else:
        first = await client.messages.create(**ask, messages=SAY)
        assert first.content[0].input == {"INVALID_JSON": arguments}
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "no such city", "is_error": True}
    back = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await client.messages.create(**ask, messages=[*SAY, *back])
    assert second.content[0].text == "sorry"
    assert forks(stage, session) == ["first", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_that_is_cut_off(stage: Stage, stream: bool) -> None:
    stage.engine.script = {"replies": [{"texts": [CALL, "go on"]}]}
    session = await stage.session()
    client = stage.anthropic(session)
    length = len(stage.renderer.tokenizer.encode(CALL)) - 12
    ask = {"model": "m", "tools": [WEATHER]}
    if stream:
        async with client.messages.stream(**ask, max_tokens=length, messages=SAY) as events:
            first = await events.get_final_message()
        assert first.content[0].input in ({}, {"days": 5.0})
    else:
        first = await client.messages.create(**ask, max_tokens=length, messages=SAY)
        assert first.content[0].input["INVALID_JSON"].startswith('{"days" : 5.0')
    assert first.stop_reason == "max_tokens"
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "cut off", "is_error": True}
    back = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    await client.messages.create(**ask, max_tokens=50, messages=[*SAY, *back])
    assert forks(stage, session) == ["first", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(stage: Stage, stream: bool) -> None:
    stage.engine.script = {"replies": [{"text": "Thought: go\nObservation: never shown"}]}
    session = await stage.session()
    client = stage.anthropic(session)
    ask = {**ASK, "messages": SAY, "stop_sequences": ["zzz", "\nObservation:"]}
    if stream:
        async with client.messages.stream(**ask) as events:
            reply = await events.get_final_message()
    else:
        reply = await client.messages.create(**ask)
    assert (reply.content[0].text, reply.stop_reason) == ("Thought: go", "stop_sequence")
    assert reply.stop_sequence == "\nObservation:"
    short = await client.messages.create(model="m", max_tokens=2, messages=SAY)
    assert (short.stop_reason, short.stop_sequence, short.usage.output_tokens) == ("max_tokens", None, 2)


@pytest.mark.parametrize("tools", [[], [WEATHER]])
async def test_tokens_are_counted_as_a_call_reports_them(stage: Stage, tools: list) -> None:
    stage.engine.script = {"replies": [{"texts": ["hello", "fine"]}]}
    session = await stage.session()
    client = stage.anthropic(session)
    messages = list(SAY)
    for _ in range(2):
        ask = {"model": "m", "messages": messages, "system": "be brief", "tools": tools}
        counted = await client.messages.count_tokens(**ask)
        assert (await client.beta.messages.count_tokens(**ask)).input_tokens == counted.input_tokens
        reply = await client.messages.create(**ask, max_tokens=20)
        assert reply.usage.input_tokens == counted.input_tokens
        messages += [reply.to_param(), {"role": "user", "content": "and you?"}]
    assert forks(stage, session) == ["first", ""], "counting leaves no trace"
    assert session.calls == 2


async def test_the_tool_runner(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"texts": [f"let me look\n{CALL}", "It is sunny"]}]}
    session = await stage.session()
    asked: list = []

    @beta_async_tool
    async def weather(city: str, days: float) -> str:
        """The weather.

        Args:
            city: where
            days: how long
        """
        asked.append((city, days))
        return "sunny"

    runner = stage.anthropic(session).beta.messages.tool_runner(**ASK, messages=SAY, tools=[weather])
    final = await runner.until_done()
    assert final.content[0].text == "It is sunny" and asked == [("Paris", 5.0)]
    assert forks(stage, session) == ["first", ""]
    assert_exact(stage, session)


async def test_a_thread_is_refused_by_its_name(stage: Stage) -> None:
    session = await stage.session()
    thread = stage.anthropic(session).beta.messages.thread(**ASK)
    with pytest.raises(anthropic.BadRequestError) as refused:
        await thread.send(*SAY)
    assert refused.value.error_code == "thread_unsupported_request"


class City(BaseModel):
    name: str
    people: int


async def test_structured_output(stage: Stage) -> None:
    stage.engine.info.constrains = True
    stage.engine.script = {"replies": [{"text": '{"name": "Paris", "people": 2100000}'}]}
    session = await stage.session()
    client = stage.anthropic(session)
    reply = await client.messages.parse(**ASK, messages=SAY, output_format=City)
    assert reply.parsed_output == City(name="Paris", people=2100000)
    async with client.beta.messages.stream(**ASK, messages=SAY, output_format=City) as stream:
        assert (await stream.get_final_message()).parsed_output.name == "Paris"
    assert all("people" in params.grammar for params in stage.engine.requests)
    stage.engine.info.constrains = False
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format: the engine"):
        await client.messages.parse(**ASK, messages=SAY, output_format=City)


async def test_a_forced_tool_call(stage: Stage) -> None:
    stage.engine.info.constrains = True
    stage.engine.script = {"replies": [{"text": CALL}]}
    session = await stage.session()
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    reply = await stage.anthropic(session).messages.create(**ASK, messages=SAY, tools=[WEATHER], tool_choice=choice)
    assert reply.content[0].name == "weather" and reply.stop_reason == "tool_use"
    assert "weather" in stage.engine.requests[0].grammar
    assert stage.calls(session)[0].request["asked"]["tool_choice"] == {"type": "tool", "name": "weather"}


async def test_models(stage: Stage) -> None:
    session = await stage.session()
    client = stage.anthropic(session)
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["tiny"]
    assert listed[0].max_input_tokens == 4096 and listed[0].display_name == "tiny"
    assert (await client.models.retrieve("tiny")).created_at.year == 1970
    assert (await stage.client(session).models.list()).data[0].object == "model", "and OpenAI's shape for its clients"
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.head(f"{stage.url}{session.path}")).status_code == 200


async def test_hosted_tools_are_left_out_with_a_note(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello"}]}
    session = await stage.session()
    tools = [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]
    await stage.anthropic(session).messages.create(**ASK, messages=SAY, tools=tools)
    asked = stage.calls(session)[0].request["asked"]
    assert asked["tools_left_out"] == ["web_search_20250305"] and asked["tools"] == ["weather"]
    prompt = stage.renderer.tokenizer.decode(stage.engine.sent[0][0])
    assert "weather" in prompt and "web_search" not in prompt


async def test_errors_are_the_sdks_own(stage: Stage, tmp_path, renderer) -> None:
    session = await stage.session()
    client = stage.anthropic(session)
    wrong = anthropic.AsyncAnthropic(base_url=f"{stage.url}{session.path}", api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await wrong.messages.create(**ASK, messages=SAY)
    assert refused.value.type == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.models.list()
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\].content\[0\]: this model reads text only"
    ) as bad:
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        await client.messages.create(**ASK, messages=[{"role": "user", "content": [image]}])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.batches.list()
    assert missing.value.type == "not_found_error"
    session.limits.request_bytes = 1000
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        await client.messages.create(**ASK, messages=[{"role": "user", "content": "x" * 2000}])
    assert large.value.body["error"]["type"] == "request_too_large"
    stage.engine.failure = "out of memory"
    with pytest.raises(anthropic.ServiceUnavailableError) as down:
        await client.messages.create(**ASK, messages=SAY)
    assert down.value.type == "api_error" and down.value.response.headers["retry-after"] == "5"
    stage.engine.failure = None
    session.limits.calls = session.calls
    with pytest.raises(anthropic.PermissionDeniedError) as over:
        await client.messages.create(**ASK, messages=SAY)
    assert (over.value.type, over.value.error_code) == ("permission_error", "rollout_limit_calls")


async def test_a_prompt_that_is_too_long(tmp_path, renderer) -> None:
    async with running(tmp_path, renderer, context_length=40) as stage:
        session = await stage.session()
        client = stage.anthropic(session)
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**ASK, messages=[{"role": "user", "content": "x" * 200}])
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x" * 200}])
        assert refused.value.api_message == f"prompt is too long: {counted.input_tokens} tokens > 40 maximum"


async def test_a_hold_that_lasts_too_long(tmp_path, renderer) -> None:
    async with running(tmp_path, renderer, max_hold_s=0.1) as stage:
        session = await stage.session()
        stage.gateway.gate.close()
        with pytest.raises(anthropic.ServiceUnavailableError) as held:
            await stage.anthropic(session).messages.create(**ASK, messages=SAY)
        assert held.value.type == "overloaded_error" and int(held.value.response.headers["retry-after"]) > 0
        stage.gateway.gate.open()
        await stage.anthropic(session).messages.create(**ASK, messages=SAY)
        assert forks(stage, session) == ["first", "first"], "asking again is no change of the conversation"


async def test_an_update_in_the_middle_of_a_tool_call(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": CALL}], "latency_s": 0.01}
    session = await stage.session()

    async def update() -> None:
        stage.gateway.gate.close()
        await stage.engine.preempt()
        await asyncio.sleep(0.1)
        await stage.engine.resume(1)
        stage.gateway.gate.open()

    updating = None
    async with stage.anthropic(session).messages.stream(**ASK, messages=SAY, tools=[WEATHER]) as stream:
        async for event in stream:
            if event.type == "input_json" and updating is None:
                updating = asyncio.create_task(update())
        final = await stream.get_final_message()
    await updating
    assert final.content[0].input == {"days": 5.0, "city": "Paris"} and final.stop_reason == "tool_use"
    assert [version for version, _ in stage.calls(session)[0].versions] == [0, 1]
    assert_exact(stage, session)


async def test_an_error_in_the_middle_of_a_stream(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "one two three four five six"}], "latency_s": 0.05}
    session = await stage.session()
    with pytest.raises(anthropic.APIStatusError) as broken:
        async with stage.anthropic(session).messages.stream(**ASK, messages=SAY) as stream:
            async for _ in stream.text_stream:
                stage.engine.failure = "out of memory"
    assert broken.value.type == "api_error" and "out of memory" in broken.value.api_message


def test_the_blocking_sdk(tmp_path, renderer) -> None:
    """From another thread, as agents use it."""

    async def main() -> None:
        async with running(tmp_path, renderer) as stage:
            replies = ["hello", "hello", "hello", '{"name": "Paris", "people": 2}', f"look\n{CALL}", "It is sunny"]
            stage.engine.script = {"replies": [{"texts": replies}]}
            stage.engine.info.constrains = True
            session = await stage.session()

            def talk() -> list:
                client = anthropic.Anthropic(base_url=stage.url, auth_token=session.token, api_key=None, max_retries=0)
                said = [client.messages.create(**ASK, messages=SAY).content[0].text]
                with client.messages.stream(**ASK, messages=SAY) as stream:
                    said.append("".join(stream.text_stream))
                with client.beta.messages.stream(**ASK, messages=SAY) as stream:
                    said.append(stream.get_final_text())
                said.append(client.messages.parse(**ASK, messages=SAY, output_format=City).parsed_output.people)

                @beta_tool
                def weather(city: str, days: float) -> str:
                    """The weather."""
                    return f"{days:g} days of sun in {city}"

                runner = client.beta.messages.tool_runner(**ASK, messages=SAY, tools=[weather], stream=True)
                for stream in runner:
                    said.append([json.loads(event.model_dump_json())["type"] for event in stream][-1])
                said.append(client.messages.count_tokens(model="m", messages=SAY).input_tokens)
                said.append([model.id for model in client.models.list()])
                return said

            said = await asyncio.to_thread(talk)
            count = len(stage.engine.sent[0][0])
            assert said == ["hello"] * 3 + [2, "message_stop", "message_stop", count, ["tiny"]]
            assert "5 days of sun in Paris" in stage.renderer.tokenizer.decode(stage.engine.sent[-1][0])

    asyncio.run(main())
