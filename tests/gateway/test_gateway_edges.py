"""Wrong tokens, limits, broken bodies, broken connections, retries: each has its shape and leaves a true record."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

import httpx
import openai
import pytest
from staging import Stage, running
from test_gateway_gate import until

from aglite.config import Limits, TrainSampling, ValSampling
from aglite.gateway.gateway import derive_seed

SAY = [{"role": "user", "content": "say hello"}]
BODY = {"model": "m", "messages": SAY}


async def post(stage: Stage, session, body, *, path: str | None = None, **headers: str) -> httpx.Response:
    path = f"{session.path}/v1/chat/completions" if path is None else path
    headers = {"authorization": f"Bearer {session.token}", **headers}
    content = body if isinstance(body, bytes) else json.dumps(body)
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{stage.url}{path}", content=content, headers=headers)


async def test_a_token_opens_its_own_rollout_while_it_runs(stage: Stage) -> None:
    one, two = await stage.session("r-1"), await stage.session("r-2")
    assert (await post(stage, one, BODY)).status_code == 200
    assert (await post(stage, one, BODY, path="/v1/chat/completions")).status_code == 200
    assert (await post(stage, one, BODY, path=f"{one.path}/chat/completions")).status_code == 200
    wrong = await post(stage, one, BODY, path=f"{two.path}/v1/chat/completions")
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert (await post(stage, one, BODY, authorization="Bearer nonsense")).status_code == 401
    assert (await post(stage, one, BODY, authorization="", **{"x-api-key": one.token})).status_code == 200
    newer = await stage.session("r-1", attempt=2)
    assert (await post(stage, one, BODY)).status_code == 401, "the token of an earlier attempt is dead"
    assert (await post(stage, newer, BODY)).status_code == 200
    await stage.gateway.close_session("r-1")
    assert (await post(stage, newer, BODY)).status_code == 401
    assert newer.token_hash not in newer.token.encode()


async def test_routes(stage: Stage) -> None:
    session = await stage.session()
    client = stage.client(session)
    models = await client.models.list()
    assert models.data[0].id == "tiny"
    assert (await client.models.retrieve("tiny")).id == "tiny"
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.head(f"{stage.url}{session.path}")).status_code == 200
        assert (await http.head(f"{stage.url}/")).status_code == 200
        assert (await http.get(f"{stage.url}{session.path}/v1/chat/completions")).status_code == 405
        missing = await http.post(f"{stage.url}{session.path}/v1/embeddings", json={})
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
        assert (await http.get(f"{stage.url}/api/status")).status_code == 404


def schema(value: dict, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": value, **more}}


DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(150), {})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*SAY, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice.allowed_tools.mode"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": schema({"enum": ["x" * 200000]})}, "response_format.json_schema.schema"),
        ({"response_format": schema(DEEP)}, "response_format.json_schema.schema"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_what_is_malformed_is_refused_by_name(stage: Stage, change: dict, param: str) -> None:
    session = await stage.session()
    response = await post(stage, session, {**BODY, **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert not stage.calls(session)


async def test_bodies_that_are_no_request(stage: Stage) -> None:
    session = await stage.session(limits=Limits(request_bytes=1000))
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'"text"'):
        response = await post(stage, session, body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "body"
    response = await post(stage, session, {**BODY, "padding": "x" * 1000})
    assert response.status_code == 413 and "1000" in response.json()["error"]["message"]

    async def endless():
        for _ in range(100):
            yield b" " * 100

    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {session.token}"}
        response = await http.post(f"{stage.url}/v1/chat/completions", content=endless(), headers=headers)
    assert response.status_code == 413


async def test_unknown_fields_and_odd_but_legal_forms(stage: Stage) -> None:
    session = await stage.session()
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "hi", "name": "bob", "cache_control": {"type": "ephemeral"}},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
        ],
        "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}],
        "prompt_cache_key": "x", "store": False, "metadata": {}, "tool_choice": "auto", "unheard_of": [1],
    }  # fmt: skip
    assert (await post(stage, session, body)).status_code == 200
    prompt = stage.renderer.tokenizer.decode(stage.engine.sent[0][0])
    assert prompt.startswith("<|im_start|>system\nbe\nbrief\n\n# Tools")
    assert '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>" in prompt
    assert stage.calls(session)[0].request["asked"]["tools_left_out"] == ["web_search"]


async def test_limits_of_a_rollout(stage: Stage) -> None:
    stage.engine.script = {"length": 9}
    session = await stage.session(limits=Limits(calls=2, sampled_tokens=100))
    for _ in range(2):
        await stage.client(session).chat.completions.create(**BODY)
    assert session.limits_hit == set()
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await stage.client(session, max_retries=3).chat.completions.create(**BODY)
    assert refused.value.code == "rollout_limit_calls"
    assert session.limits_hit == {"calls"} and session.infra_error is None

    session = await stage.session("r-2", limits=Limits(calls=9, sampled_tokens=15))
    first = await stage.client(session).chat.completions.create(**BODY)
    second = await stage.client(session).chat.completions.create(**BODY)
    assert (first.choices[0].finish_reason, second.choices[0].finish_reason) == ("stop", "length")
    assert second.usage.completion_tokens == 5
    assert session.limits_hit == {"sampled_tokens"} and session.sampled_tokens == 15
    with pytest.raises(openai.PermissionDeniedError):
        await stage.client(session).chat.completions.create(**BODY)
    assert len(stage.calls(session)) == 2


async def test_the_context_is_enforced_here(tmp_path: Path, renderer) -> None:
    async with running(tmp_path, renderer, context_length=64) as stage:
        stage.engine.script = {"length": 100}
        session = await stage.session()
        reply = await stage.client(session).chat.completions.create(**BODY, max_tokens=32000)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.total_tokens == 64
        with pytest.raises(openai.BadRequestError) as refused:
            await stage.client(session).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "word " * 100}]
            )
        assert "maximum context length is 64 tokens" in str(refused.value)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failures(stage: Stage, stream: bool) -> None:
    session = await stage.session()
    stage.engine.failure = "the worker died"
    with pytest.raises(openai.InternalServerError) as failed:
        await stage.client(session).chat.completions.create(**BODY, stream=stream)
    assert failed.value.status_code == 503 and "the worker died" in str(failed.value)
    assert "the worker died" in session.infra_error
    stage.engine.failure = None
    stage.engine.script = {"latency_s": 0.01, "length": 50}
    request = asyncio.create_task(stage.client(session).chat.completions.create(**BODY, stream=stream))
    await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) > 5)
    stage.engine.failure = "it died again"
    if stream:
        with pytest.raises(openai.APIError, match="it died again"):
            async for _ in await request:
                pass
    else:
        with pytest.raises(openai.InternalServerError):
            await request
    await until(lambda: len(stage.calls(session)) == 2)
    calls = stage.calls(session)
    assert [call.status for call in calls] == ["error", "error"]
    assert calls[1].response_ids.tolist() == stage.engine.sent[0][1]
    assert not calls[1].delivered


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_sampling(stage: Stage, stream: bool) -> None:
    stage.engine.script = {"latency_s": 0.01, "length": 500}
    session = await stage.session()
    request = asyncio.create_task(post(stage, session, {**BODY, "stream": stream}))
    await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) > 3)
    request.cancel()
    await until(lambda: stage.engine.cancelled == 1)
    await until(lambda: stage.calls(session))
    (call,) = stage.calls(session)
    assert (call.status, call.delivered) == ("cancelled", False)
    assert call.response_ids.tolist() == stage.engine.sent[0][1]
    assert stage.engine.running == 0 and await stage.gateway.idle(1)


async def test_a_retry_after_a_broken_connection_joins(stage: Stage) -> None:
    """The reply was sampled and recorded, but the connection was gone before its end: the retry gets the same one."""
    stage.engine.script = {"replies": [{"text": "the only reply"}]}
    session = await stage.session()
    add_call = stage.store.add_call
    slow = asyncio.Event()

    async def late(record):
        await slow.wait()
        return await add_call(record)

    stage.store.add_call = late
    request = asyncio.create_task(post(stage, session, BODY))
    await until(lambda: stage.engine.sent and stage.engine.running == 0)
    request.cancel()
    await until(lambda: next(iter(session.exchanges)).connection.gone)
    slow.set()
    await until(lambda: not session.exchanges)
    await stage.gateway.deliveries.flush()
    assert not stage.calls(session)[0].delivered
    response = await post(stage, session, BODY)
    assert response.json()["choices"][0]["message"]["content"] == "the only reply"
    await stage.gateway.deliveries.flush()
    (call,) = stage.calls(session)
    assert call.delivered and len(stage.engine.sent) == 1


async def test_a_declared_retry_joins_what_is_in_flight(stage: Stage) -> None:
    stage.engine.script = {"latency_s": 0.01, "length": 20}
    session = await stage.session()
    await stage.engine.preempt()  # it must not end before the retry has joined
    first = asyncio.create_task(post(stage, session, BODY))
    await until(lambda: stage.engine.running == 1)
    second = asyncio.create_task(post(stage, session, BODY, **{"x-stainless-retry-count": "1"}))
    exchange = next(iter(session.exchanges))
    await until(lambda: exchange.joiners == 1)
    first.cancel()
    await stage.engine.resume(0)
    response = await second
    assert response.status_code == 200
    await stage.gateway.deliveries.flush()
    (call,) = stage.calls(session)
    assert call.status == "ok" and call.delivered and len(call.response_ids) == 21
    # An identical request that is no retry is sampled anew.
    await post(stage, session, BODY)
    await post(stage, session, BODY)
    assert len(stage.calls(session)) == 3
    assert [call.fork_cause for call in stage.calls(session)] == ["first"] * 3


async def test_a_later_call_proves_an_earlier_one_delivered(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": "hello"}]}
    session = await stage.session()
    marked = stage.gateway.deliveries.note
    stage.gateway.deliveries.note = lambda ids: None
    await post(stage, session, BODY)
    stage.gateway.deliveries.note = marked
    for exchange in session.retries:
        for call in exchange._calls:
            call.delivered = False
    more = [*SAY, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    await post(stage, session, {**BODY, "messages": more})
    await stage.gateway.deliveries.flush()
    assert [call.delivered for call in stage.calls(session)] == [True, True]


async def test_the_end_of_a_rollout_ends_its_requests(stage: Stage) -> None:
    stage.engine.script = {"latency_s": 0.01, "length": 1000}
    session = await stage.session()
    request = asyncio.create_task(post(stage, session, BODY))
    await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) > 3)
    await stage.gateway.close_session(session.rollout_id)
    assert (await request).status_code == 401
    (call,) = stage.calls(session)
    assert call.status == "cancelled" and stage.engine.running == 0
    held = await stage.session("r-2")
    stage.gateway.gate.close()
    request = asyncio.create_task(post(stage, held, BODY))
    await until(lambda: stage.gateway.gate.held == 1)
    await stage.gateway.close_session("r-2")
    assert (await request).status_code == 401 and stage.gateway.gate.held == 0


async def test_sampling_is_the_recipes(stage: Stage) -> None:
    asked = {**BODY, "temperature": 0, "top_p": 0.1, "seed": 3, "max_tokens": 7}
    train = await stage.session("r-1", sampling=TrainSampling(temperature=0.7))
    val = await stage.session("r-2", sampling=ValSampling(temperature=0.5, top_p=0.9, top_k=5), seed=11)
    serve = await stage.session("r-3", sampling=None)
    for session in (train, val, val, serve):
        await post(stage, session, asked)
    one, two, three, four = stage.engine.requests
    assert (one.temperature, one.top_p, one.seed, one.max_tokens) == (0.7, 1.0, None, 7)
    assert (two.temperature, two.top_p, two.top_k, two.seed) == (0.5, 0.9, 5, derive_seed(11, 0))
    assert three.seed == derive_seed(11, 1) != two.seed
    assert (four.temperature, four.top_p) == (0, 0.1) and four.seed is not None


async def test_serving_takes_anybody(stage: Stage) -> None:
    stage.gateway.serve_open = True
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{stage.url}/v1/chat/completions"
        answers = await asyncio.gather(
            *(http.post(url, json=BODY, headers={"authorization": "Bearer me"}) for _ in range(4)),
            http.post(url, json=BODY),
        )
    assert [answer.status_code for answer in answers] == [200] * 5
    rollouts = stage.store.rollouts()
    assert sorted(row["calls"] for row in rollouts) == [1, 4]
    assert {row["backend"] for row in rollouts} == {"external"}
    await stage.gateway.stop()
    assert {row["state"] for row in stage.store.rollouts()} == {"done"}


async def test_serving_for_long_begins_anew(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aglite.gateway.gateway.EXTERNAL_CALLS", 3)
    stage.gateway.serve_open = True
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(7):
            response = await http.post(
                f"{stage.url}/v1/chat/completions", json=BODY, headers={"authorization": "Bearer me"}
            )
            assert response.status_code == 200
    assert sorted((row["calls"], row["state"]) for row in stage.store.rollouts()) == [
        (1, "running"),
        (3, "done"),
        (3, "done"),
    ]


async def test_a_store_that_cannot_write_is_our_error(stage: Stage) -> None:
    from aglite.errors import StoreError

    session = await stage.session()

    async def full(record):
        raise StoreError("the disk is full", "free some space")

    stage.store.add_call = full
    response = await post(stage, session, BODY)
    assert response.status_code == 500 and "disk is full" in response.json()["error"]["message"]
    assert "disk is full" in session.infra_error
