"""Held requests, updates in the middle of a generation, and what the time held is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import openai
import pytest
from staging import Stage, running

from aglite.gateway.gate import Gate, HeldTooLong

SAY = [{"role": "user", "content": "say hello"}]


async def until(condition, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


async def test_first_held_first_let_through() -> None:
    gate = Gate(10)
    gate.close()
    order: list[int] = []
    leave = asyncio.Event()

    async def enter(number: int) -> None:
        async with gate.through():
            order.append(number)
            await leave.wait()

    tasks = []
    for number in range(20):
        tasks.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)
    assert gate.held == 20 and gate.inside == 0
    gate.open()
    assert gate.inside == 20, "counted before they wake"
    assert not await gate.idle(0.001)
    leave.set()
    await asyncio.gather(*tasks)
    assert order == list(range(20))
    assert await gate.idle(0.001)


async def test_one_that_gives_up_leaves_no_trace() -> None:
    gate = Gate(60)
    gate.close()

    async def enter() -> None:
        async with gate.through():
            pass

    task = asyncio.create_task(enter())
    await until(lambda: gate.held == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.max_hold_s = 0.05
    with pytest.raises(HeldTooLong):
        await enter()
    assert gate.held == 0
    # Let through and cancelled in the same turn of the loop.
    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    gate.open()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.inside == 0 and await gate.idle(0.001)


async def test_closed_time_adds_up() -> None:
    gate = Gate(1)
    most = 0.0
    for _ in range(2):
        began = time.monotonic()
        gate.close()
        gate.close()
        await asyncio.sleep(0.05)
        gate.open()
        gate.open()
        most += time.monotonic() - began
        await asyncio.sleep(0.05)
    assert 0.09 < gate.closed_s() <= most


@pytest.mark.parametrize("stream", [False, True])
async def test_a_held_request_is_slow_not_wrong(stage: Stage, stream: bool) -> None:
    stage.engine.script = {"replies": [{"text": "hello"}]}
    session = await stage.session()
    stage.gateway.gate.close()
    reply = asyncio.create_task(stage.client(session).chat.completions.create(model="m", messages=SAY, stream=stream))
    await until(lambda: stage.gateway.gate.held == 1)
    await asyncio.sleep(0.1)
    assert not stage.engine.sent, "nothing is sampled by the old weights"
    assert session.held_s > 0.09
    stage.engine.version = 5
    stage.gateway.gate.open()
    answer = await reply
    if stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in answer]) == "hello"
    else:
        assert answer.choices[0].message.content == "hello"
    held = session.held_s
    await asyncio.sleep(0.02)
    assert session.held_s == held
    (call,) = stage.calls(session)
    assert call.versions == [[5, len(call.response_ids)]]
    assert held <= call.held_s <= stage.gateway.gate.closed_s()


async def test_a_hold_past_the_limit_is_a_503_that_says_when_to_come_back(tmp_path: Path, renderer) -> None:
    async with running(tmp_path, renderer, max_hold_s=0.1) as stage:
        session = await stage.session()
        stage.gateway.gate.close()
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.client(session).chat.completions.create(model="m", messages=SAY)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert session.infra_error is not None
        (call,) = stage.calls(session)
        assert (call.status, len(call.response_ids)) == ("error", 0)
        stage.gateway.gate.open()
        await stage.client(session).chat.completions.create(model="m", messages=SAY)
        assert session.infra_error is None
        assert stage.calls(session)[1].parent_id is None, "a call without a reply is nobody's parent"


async def test_a_hold_that_ends_while_nothing_runs_is_one_of_a_request_that_was_never_sampled(
    tmp_path: Path, renderer
) -> None:
    """Its own time and the look at all that is held are late together."""
    async with running(tmp_path, renderer, max_hold_s=0.2) as stage:
        session = await stage.session()
        stage.gateway.gate.close()
        reply = asyncio.create_task(stage.client(session).chat.completions.create(model="m", messages=SAY))
        await until(lambda: stage.gateway.gate.held == 1)
        time.sleep(0.5)  # noqa: ASYNC251 (as on a machine that does something else)
        with pytest.raises(openai.InternalServerError):
            await reply
        (call,) = stage.calls(session)
        assert call.status == "error"


async def test_an_update_in_the_middle_of_a_streamed_tool_call_is_invisible(stage: Stage) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2, 3]}}\n</tool_call>'
    stage.engine.script = {"replies": [{"text": text}], "latency_s": 0.005}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    session = await stage.session()
    stream = await stage.client(session).chat.completions.create(model="m", messages=SAY, tools=tools, stream=True)
    arguments, paused, held = "", False, 0.0
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments or ""
        if arguments and not paused:
            paused = True
            stage.gateway.gate.close()
            await stage.engine.preempt()
            assert not await stage.gateway.idle(0.1), "the generation is still in flight"
            await stage.engine.resume(7)
            stage.gateway.gate.open()
            held = session.held_s
    assert arguments == '{"city": "Paris", "days": [1, 2, 3]}'
    (call,) = stage.calls(session)
    assert [version for version, _ in call.versions] == [0, 7]
    assert held >= 0.1
    assert await stage.gateway.idle(1)


async def test_a_preempted_request_without_a_byte_gets_the_503_too(tmp_path: Path, renderer) -> None:
    async with running(tmp_path, renderer, max_hold_s=0.2) as stage:
        stage.engine.script = {"replies": [{"text": "a long enough reply"}], "latency_s": 0.02}
        session = await stage.session()
        reply = asyncio.create_task(stage.client(session).chat.completions.create(model="m", messages=SAY))
        await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) > 2)
        stage.gateway.gate.close()
        await stage.engine.preempt()
        with pytest.raises(openai.InternalServerError):
            await asyncio.wait_for(reply, 60)
        (call,) = stage.calls(session)
        assert call.status == "cancelled" and len(call.response_ids) == len(stage.engine.sent[0][1])
        assert not call.delivered


async def test_keep_alives_in_a_silent_stream(tmp_path: Path, renderer, monkeypatch) -> None:
    monkeypatch.setattr("aglite.gateway.gateway.KEEPALIVE_S", 0.05)
    async with running(tmp_path, renderer, max_hold_s=0.2) as stage:
        stage.engine.script = {"replies": [{"text": "hello big world of many words"}], "latency_s": 0.01}
        create = stage.client(await stage.session()).chat.completions.create
        reply = asyncio.create_task(create(model="m", messages=SAY, stream=True))
        await until(lambda: stage.engine.sent and stage.engine.sent[0][1])
        stage.gateway.gate.close()
        await stage.engine.preempt()
        raw = []
        async for line in (await reply).response.aiter_lines():
            raw.append(line)
            if raw.count(": keep-alive") >= 2 and stage.gateway.gate.closed_s() > 0.4:  # longer than max_hold_s
                stage.engine._going.set()
        assert raw.count(": keep-alive") >= 2
        assert raw[-2] == "data: [DONE]" or raw[-1] == "data: [DONE]"
