"""Chat Completions as the official SDK sees them, and what is recorded of them."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import openai
import pytest
from staging import Stage, running

SAY = [{"role": "user", "content": "say hello"}]
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def assert_exact(stage: Stage, session) -> None:
    """Every recorded token, log-probability and version is what the engine sent, in the order sent."""
    calls = sorted(stage.calls(session), key=lambda call: call.id)
    assert len(calls) == len(stage.engine.sent)
    for call in calls:
        versions = [version for version, count in call.versions for _ in range(count)]
        row = (call.prompt_ids.tolist(), call.response_ids.tolist(), call.logprobs.tolist(), versions)
        assert row in stage.engine.sent


async def test_a_reply_and_its_record(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello wörld ✓"}]}
    session = await stage.session()
    reply = await stage.client(session).chat.completions.create(model="any", messages=SAY, temperature=0.1, top_p=0.5)
    assert reply.choices[0].message.content == "hello wörld ✓"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "any"
    await stage.gateway.deliveries.flush()
    (call,) = stage.calls(session)
    assert_exact(stage, session)
    assert (call.fork_cause, call.status, call.delivered, call.finish_reason) == ("first", "ok", True, "stop")
    assert reply.usage.prompt_tokens == len(call.prompt_ids)
    assert reply.usage.completion_tokens == len(call.response_ids)
    assert call.request["asked"]["temperature"] == 0.1
    assert call.request["used"]["temperature"] == 0.7, "the recipe's sampling holds"
    assert stage.engine.requests[0].top_p == 1.0
    assert stage.store.messages(call) == SAY
    assert stage.store.reply(call)["content"] == "hello wörld ✓"


async def test_a_stream_comes_token_by_token(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "one two three ünïcode"}], "latency_s": 0.02}
    session = await stage.session()
    loop = asyncio.get_running_loop()
    stream = await stage.client(session).chat.completions.create(
        model="m", messages=SAY, stream=True, stream_options={"include_usage": True}
    )
    times, text, chunks = [], "", []
    async for chunk in stream:
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(loop.time())
            text += chunk.choices[0].delta.content
    assert text == "one two three ünïcode"
    assert len(times) > 5 and times[-1] - times[0] > 0.1, "pieces are spread over the time of sampling"
    assert chunks[-1].usage.completion_tokens == len(stage.engine.sent[0][1])
    assert chunks[-2].choices[0].finish_reason == "stop"
    await stage.gateway.deliveries.flush()
    assert stage.calls(session)[0].delivered
    assert_exact(stage, session)


async def test_turns_that_append_continue_the_recorded_tokens(stage: Stage) -> None:
    # Tokens that encoding the text would never give: the characters one by one.
    ids = [i for char in "hello world" for i in stage.renderer.tokenizer.encode(char)] + [stage.renderer.stop_ids[0]]
    assert stage.renderer.tokenizer.encode("hello world") != ids[:-1]
    stage.engine.script = {"replies": [{"ids": ids}]}
    session = await stage.session()
    client = stage.client(session)
    messages = list(SAY)
    for turn in range(4):
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": f"question {turn}"},
        ]
    calls = stage.calls(session)
    assert [call.fork_cause for call in calls] == ["first", "", "", ""]
    for before, after in pairwise(calls):
        known = (before.prompt_ids + before.response_ids).tolist()
        assert after.prompt_ids[: len(known)].tolist() == known
        assert after.parent_id == before.id == after.matched_id == after.base_id
    assert_exact(stage, session)
    assert stage.store.messages(calls[3]) == messages[:-2]


async def test_tools_through_the_sdk(stage: Stage) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city" : "Paris"}}\n</tool_call>'
    stage.engine.script = {"replies": [{"texts": [f"let me look\n{call}\n{call}", "It is sunny"]}]}
    session = await stage.session()
    client = stage.client(session)
    messages: list = list(SAY)
    first = await client.chat.completions.create(model="m", messages=messages, tools=WEATHER)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "let me look"
    assert [one.function.arguments for one in message.tool_calls] == ['{"city" : "Paris"}'] * 2
    assert len({one.id for one in message.tool_calls}) == 2
    prompt = stage.renderer.tokenizer.decode(stage.engine.sent[0][0])
    assert "<tools>" in prompt and '"name":"weather"' in prompt
    # The harness parses the arguments and writes them out anew.
    again = message.model_dump(exclude_none=True)
    for one in again["tool_calls"]:
        one["function"]["arguments"] = json.dumps(json.loads(one["function"]["arguments"]), indent=1)
    messages += [again]
    messages += [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in message.tool_calls]
    second = await client.chat.completions.create(model="m", messages=messages, tools=WEATHER)
    assert second.choices[0].message.content == "It is sunny"
    calls = stage.calls(session)
    assert calls[1].fork_cause == "" and calls[1].parent_id == calls[0].id
    assert_exact(stage, session)


async def test_streamed_tool_calls(stage: Stage) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par}is", "more": ["\\"}"]}}\n</tool_call>'
    stage.engine.script = {"replies": [{"text": f"look\n{call}"}]}
    session = await stage.session()
    async with stage.client(session).chat.completions.stream(model="m", messages=SAY, tools=WEATHER) as stream:
        pieces = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    assert len(pieces) > 3, "arguments arrive as they are sampled"
    message = final.choices[0].message
    assert message.content == "look"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Par}is", "more": ['"}']}
    assert final.choices[0].finish_reason == "tool_calls"


async def test_several_completions_of_one_prompt(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"texts": ["alpha", "beta", "gamma"]}]}
    session = await stage.session()
    reply = await stage.client(session).chat.completions.create(model="m", messages=SAY, n=3)
    assert [choice.message.content for choice in reply.choices] == ["alpha", "beta", "gamma"]
    calls = stage.calls(session)
    assert_exact(stage, session)
    assert [call.prompt_ids for call in calls] == [calls[0].prompt_ids] * 3
    assert session.calls == 3
    assert reply.usage.completion_tokens == sum(len(call.response_ids) for call in calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(stage: Stage, stream: bool) -> None:
    stage.engine.script = {"replies": [{"text": "Thought: go\nObservation: never shown"}]}
    session = await stage.session()
    client = stage.client(session)
    reply = await client.chat.completions.create(model="m", messages=SAY, stop=["\nObservation:", "zzz"], stream=stream)
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in reply if c.choices])
    else:
        text = reply.choices[0].message.content
    assert text == "Thought: go"
    (call,) = stage.calls(session)
    recorded = stage.renderer.tokenizer.decode(call.response_ids.tolist())
    assert recorded.startswith("Thought: go\nObservation:") and "never shown" not in recorded
    assert call.finish_reason == "stop"


async def test_log_probabilities(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello ✓"}]}
    session = await stage.session()
    reply = await stage.client(session).chat.completions.create(model="m", messages=SAY, logprobs=True)
    content = reply.choices[0].logprobs.content
    assert [one.logprob for one in content] == stage.engine.sent[0][2]
    assert bytes(b for one in content[:-1] for b in one.bytes).decode() == "hello ✓"


def test_sync_client(model_dir, tmp_path, renderer) -> None:
    """The blocking SDK from another thread, as agents use it."""

    async def main() -> None:
        async with running(tmp_path, renderer) as stage:
            stage.engine.script = {"replies": [{"text": "hello"}]}
            session = await stage.session()

            def talk() -> tuple[str, str]:
                client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key=session.token, max_retries=0)
                plain = client.chat.completions.create(model="m", messages=SAY).choices[0].message.content
                stream = client.chat.completions.create(model="m", messages=SAY, stream=True)
                return plain, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

            assert await asyncio.to_thread(talk) == ("hello", "hello")

    asyncio.run(main())
