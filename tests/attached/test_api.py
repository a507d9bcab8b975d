"""A model behind a Chat Completions endpoint: text passed through, whatever dialect the agent speaks."""

import asyncio
import json

import anthropic
import openai
import pytest
from aiohttp import web
from staging import running
from upstreams import ApiServer, said

from aglite.config import Limits, ValSampling
from aglite.engine.api import ApiEngine
from aglite.gateway.text import TextRenderer

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


@pytest.fixture
async def endpoint():
    server = ApiServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def stage(tmp_path, endpoint, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-secret-1")
    engine = ApiEngine(endpoint.url + "/v1", "big-model", key_env="THE_KEY")
    async with running(tmp_path, TextRenderer(), engine=engine, context_length=0) as made:
        yield made
    await engine.stop()


async def test_a_reply_is_passed_through_and_recorded_as_text(stage, endpoint):
    endpoint.replies = [said({"role": "assistant", "content": "Hi "}, {"content": "you"}), said({"content": "Bye"})]
    session = await stage.session()
    client = stage.client(session)
    first = await client.chat.completions.create(model="m", messages=HELLO)
    assert first.choices[0].message.content == "Hi you" and first.choices[0].finish_reason == "stop"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (7, 3)
    messages = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "bye"}]
    await client.chat.completions.create(model="m", messages=messages)
    sent = endpoint.requests[0]
    assert sent["model"] == "big-model" and sent["messages"] == HELLO and sent["stream"]
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-secret-1"
    one, two = stage.calls(session)
    assert one.prompt_ids.tolist() == one.response_ids.tolist() == [] and one.versions == []
    assert one.request["used"]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}
    assert one.request["used"]["model"] == "big-model"
    assert (two.parent_id, two.matched_id, two.base_id, two.fork_cause) == (one.id, one.id, one.id, "")
    assert [message["content"] for message in stage.store.messages(two)] == ["hello", "Hi you", "bye"]
    assert stage.store.reply(two)["content"] == "Bye"
    assert session.sampled_tokens == 6


async def test_interleaved_threads_keep_their_own_history(stage, endpoint):
    endpoint.replies = [said({"content": text}) for text in ("a1", "b1", "a2")]
    session = await stage.session()
    client = stage.client(session)
    await client.chat.completions.create(model="m", messages=HELLO)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "other"}])
    more = [*HELLO, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="m", messages=more)
    one, two, three = stage.calls(session)
    assert (two.parent_id, two.fork_cause) == (None, "new_thread")
    assert three.parent_id == one.id
    assert [message["content"] for message in stage.store.messages(three)] == ["hello", "a1", "go on"]


async def test_tools_and_reasoning_are_streamed_as_they_come(stage, endpoint):
    call = {"index": 1, "id": "call_9", "function": {"name": "bash", "arguments": ""}}
    endpoint.replies = [
        said(
            {"reasoning_content": "hm"},
            {"content": "Look:"},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": 1, "function": {"arguments": '{"command"'}}]},
            {"tool_calls": [{"index": 1, "function": {"arguments": ': "ls"}'}}]},
            finish="tool_calls",
        )
    ]
    session = await stage.session()
    stream = await stage.client(session).chat.completions.create(
        model="m", messages=HELLO, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    parts = [part async for part in stream]
    deltas = [part.choices[0].delta for part in parts if part.choices]
    arguments = [one.tool_calls[0].function.arguments for one in deltas if one.tool_calls]
    assert arguments == ["", '{"command"', ': "ls"}']
    assert [one.reasoning_content for one in deltas if getattr(one, "reasoning_content", None)] == ["hm"]
    assert parts[-1].usage.completion_tokens == 3
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "tool_calls"
    assert endpoint.requests[0]["tools"] == [TOOL]
    (recorded,) = stage.calls(session)
    reply = stage.store.reply(recorded)
    assert reply["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert reply["reasoning_content"] == "hm"


async def test_settings_that_are_the_protocols_own_are_left_out(stage, endpoint):
    endpoint.replies = [said({"content": "x"}), said({"content": "x"})]
    plain = await stage.session("r-1", sampling=None, limits=Limits(calls=10, sampled_tokens=2**31))
    await stage.client(plain).chat.completions.create(model="m", messages=HELLO)
    assert endpoint.requests[0].keys() == {"model", "messages", "stream", "stream_options"}
    rule = ValSampling(temperature=0.2, top_p=0.9)
    val = await stage.session("r-2", sampling=rule, limits=Limits(calls=10, sampled_tokens=500), seed=4)
    await stage.client(val).chat.completions.create(model="m", messages=HELLO, stop=["END"], temperature=1.5)
    sent = endpoint.requests[1]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["stop"]) == (0.2, 0.9, 500, ["END"])
    assert isinstance(sent["seed"], int) and "top_k" not in sent


async def test_a_limit_by_its_newer_name(stage, endpoint):
    words = "Unsupported parameter: 'max_tokens' is not supported with this model."
    no = (400, {"error": {"message": words, "param": "max_tokens", "code": "unsupported_parameter"}}, {})
    endpoint.replies = [no, said({"content": "one"}), said({"content": "two"})]
    client = stage.client(await stage.session())
    for text in ("one", "two"):
        reply = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=9)
        assert reply.choices[0].message.content == text
    assert ["max_completion_tokens" in sent for sent in endpoint.requests] == [False, True, True]
    assert "max_tokens" not in endpoint.requests[2]


async def test_a_limit_by_its_newer_name_for_all_who_ask_at_once(stage, endpoint, monkeypatch):
    """They were sent before anybody knew, and all of them are refused."""

    async def answer(request, known=endpoint.answer):
        if "max_tokens" not in await request.json():
            return await known(request)
        while len(endpoint.requests) < 3:  # noqa: ASYNC110 (it has no event for it)
            await asyncio.sleep(0.01)
        return web.json_response({"error": {"message": "use the newer name", "param": "max_tokens"}}, status=400)

    monkeypatch.setattr(endpoint, "answer", answer)
    endpoint.replies = [said({"content": "x"}) for _ in range(3)]
    create = stage.client(await stage.session()).chat.completions.create
    replies = await asyncio.gather(*(create(model="m", messages=HELLO, max_tokens=9) for _ in range(3)))
    assert [reply.choices[0].message.content for reply in replies] == ["x"] * 3


async def test_the_rollouts_token_limit_counts_what_the_endpoint_counts(stage, endpoint):
    endpoint.replies = [said({"content": "x"}, usage=(5, 40))]
    session = await stage.session(limits=Limits(calls=10, sampled_tokens=40))
    client = stage.client(session)
    await client.chat.completions.create(model="m", messages=HELLO)
    with pytest.raises(openai.PermissionDeniedError, match="may sample 40 tokens"):
        await client.chat.completions.create(model="m", messages=HELLO)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((429, {"error": {"message": "slow down"}}, {"retry-after": "21"}), 503, "slow down"),
        ((500, {"error": {"message": "oh no"}}, {}), 503, "oh no"),
        ((400, {"error": {"message": "unknown tool", "code": "bad_tool"}}, {}), 400, "unknown tool"),
        ((401, {"error": {"message": "Incorrect API key"}}, {}), 503, r"Incorrect API key .*\$THE_KEY"),
        ((422, {"detail": "no such role"}, {}), 400, "no such role"),
    ],
)
async def test_errors_of_the_endpoint(stage, endpoint, answer, status, words):
    endpoint.replies = [answer]
    session = await stage.session()
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        await stage.client(session).chat.completions.create(model="m", messages=HELLO)
    assert caught.value.status_code == status
    assert "sk-secret-1" not in str(caught.value)
    if status == 503:
        assert caught.value.response.headers["retry-after"] == answer[2].get("retry-after", "5")
        assert session.infra_error
    else:
        assert session.infra_error is None
    (call,) = stage.calls(session)
    assert call.status == "error" and "sk-secret-1" not in json.dumps(call.request)


async def test_an_error_in_the_middle_of_a_stream(stage, endpoint):
    endpoint.replies = [[*said({"content": "x"})[:1], 0.2, {"error": {"message": "overloaded"}}]]
    stream = await stage.client(await stage.session()).chat.completions.create(model="m", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="overloaded"):
        async for _ in stream:
            pass


async def test_a_prompt_too_long_for_the_endpoint_is_worded_as_the_agents_know_it(stage, endpoint):
    words = (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens. "
        "Please reduce the length of the messages."
    )
    endpoint.replies = [(400, {"error": {"message": words, "code": "context_length_exceeded"}}, {})]
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.client(await stage.session()).chat.completions.create(model="m", messages=HELLO)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value) and "9001" in str(caught.value)


async def test_text_completion_is_refused(stage):
    with pytest.raises(openai.BadRequestError, match="tokens are known"):
        await stage.client(await stage.session()).completions.create(model="m", prompt="once")


async def test_anthropics_dialect(stage, endpoint):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
    endpoint.replies = [said({"content": "look"}, {"tool_calls": [call]}), said({"content": "done"})]
    session = await stage.session()
    client = stage.anthropic(session)
    tool = {"name": "bash", "input_schema": {"type": "object"}}
    ask = {"model": "m", "max_tokens": 9, "tools": [tool]}
    async with client.messages.stream(**ask, messages=HELLO) as stream:
        first = await stream.get_final_message()
    assert first.content[1].input == {"a": 1} and (first.usage.input_tokens, first.usage.output_tokens) == (7, 3)
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "ok"}
    await client.messages.create(**ask, messages=[*HELLO, first.to_param(), {"role": "user", "content": [result]}])
    assert endpoint.requests[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    assert stage.calls(session)[1].fork_cause == ""
    with pytest.raises(anthropic.NotFoundError, match="cannot be counted"):
        await client.messages.count_tokens(model="m", messages=HELLO)
    assert (await client.models.retrieve("m")).max_input_tokens is None
