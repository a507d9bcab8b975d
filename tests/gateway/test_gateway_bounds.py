"""What one agent asks for costs the others neither time nor memory, however it is put."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from typing import Any

import httpx
import openai
import pytest
from staging import Stage

from aglite.gateway import gateway as gateway_module
from aglite.gateway.dialects.chat import ChatDialect
from aglite.gateway.dialects.messages import MessagesDialect
from aglite.gateway.dialects.responses import ResponsesDialect
from aglite.gateway.parsers import HermesParser, ToolArguments
from aglite.gateway.renderers import ChatRenderer

USER = {"role": "user", "content": "hi"}


def _client(stage: Stage, session: Any) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {session.token}", "content-type": "application/json"}
    return httpx.AsyncClient(base_url=f"{stage.url}{session.path}/v1", headers=headers, timeout=120)


_DEEP = {
    "arguments of a call": (
        "/chat/completions",
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
        '[{"id": "a", "function": {"name": "f", "arguments": DEEP}}]}]}',
    ),
    "tool": ("/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
             '"function": {"name": "f", "parameters": DEEP}}]}'),
    "echoed text": ("/responses", '{"input": "x", "text": {"format": {"type": "text"}, "more": DEEP}}'),
    "echoed tool": ("/responses", '{"input": "x", "tools": [{"type": "web_search", "more": DEEP}]}'),
    "arguments of an item": (
        "/responses", '{"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": DEEP}]}'),
    "recorded choice": ("/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "logit_bias": DEEP}'),
    "input of a block": (
        "/messages",
        '{"max_tokens": 5, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": '
        '[{"type": "tool_use", "id": "a", "name": "f", "input": DEEP}]}, {"role": "user", "content": "x"}]}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", _DEEP)
async def test_nesting_is_taken_as_far_as_it_can_be_written_again(stage: Stage, place: str) -> None:
    """Levels that JSON can be read with are more than it can be written with: no depth is an error of ours."""
    path, body = _DEEP[place]
    session = await stage.session()
    outside = body[: body.index("DEEP")]
    around = sum(outside.count(one) for one in "{[") - sum(outside.count(one) for one in "}]")
    async with _client(stage, session) as client:
        for levels, status in (
            (100, 200),
            (gateway_module.NESTING, 200),
            (gateway_module.NESTING + 1, 400),
            (900, 400),
        ):
            inner = levels - around
            deep = '{"a":' * inner + "1" + "}" * inner
            reply = await client.post(path, content=body.replace("DEEP", deep))
            assert reply.status_code == status, (levels, reply.text[:200])
            if status == 400:
                assert "nested more than 250 levels deep" in reply.text
    assert session.infra_error is None


def test_the_time_for_very_many_tools_grows_with_their_number_only() -> None:
    functions = [{"name": f"a{at}"} for at in range(20_000)]
    chat: dict[str, Any] = {"messages": [USER], "tools": [{"type": "function", "function": one} for one in functions]}
    chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chat["tools"]}}
    responses: dict[str, Any] = {"input": "hi", "tools": [{"type": "function", **one} for one in functions]}
    responses["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": responses["tools"]}
    messages = {"messages": [USER], "max_tokens": 1, "tools": [{**one, "input_schema": {}} for one in functions]}
    for dialect, body in ((ChatDialect(), chat), (ResponsesDialect(), responses), (MessagesDialect(), messages)):
        began = time.process_time()
        assert len(dialect.parse(body).tools) == 20_000
        assert time.process_time() - began < 2


async def test_stop_strings_are_limited_in_number_and_length(stage: Stage) -> None:
    session = await stage.session()
    client = stage.client(session)
    for stop, said in ((["x"] * 65, "64 strings, it has 65"), (["y" * 1001], "1000 characters, one has 1001")):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.chat.completions.create(model="m", messages=[USER], stop=stop)
    most = [f"stop {at}".ljust(1000, "z") for at in range(64)]
    reply = await client.chat.completions.create(model="m", messages=[USER], stop=most)
    assert reply.choices[0].finish_reason == "stop"


async def test_token_ids_that_the_model_has_not_are_refused(stage: Stage) -> None:
    """An engine would look them up beyond the end of its table."""
    client = stage.client(await stage.session())
    size = stage.renderer.tokenizer.vocab_size
    with pytest.raises(openai.BadRequestError, match=f"token id {size}, the model has {size} tokens"):
        await client.completions.create(model="m", prompt=[1, size, 2])
    await client.completions.create(model="m", prompt=[1, size - 1, 2])
    assert len(stage.engine.sent) == 1


async def test_an_error_does_not_repeat_what_is_megabytes_long(stage: Stage) -> None:
    async with _client(stage, await stage.session()) as client:
        reply = await client.post("/chat/completions", json={"messages": [{"role": "x" * 10**6, "content": ""}]})
    assert reply.status_code == 400 and len(reply.text) < 3000
    assert reply.json()["error"]["message"].startswith("messages[0].role must be one of")


async def test_refused_and_counted_requests_leave_nothing_in_memory(stage: Stage) -> None:
    """They are under no limit of the rollout."""
    session = await stage.session()

    def body(at: int) -> dict[str, Any]:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {"text": f"{at} " * 70_000}}
        system = f"system {at} " * 20_000
        return {"system": system, "messages": [USER, {"role": "assistant", "content": [call]}, USER], "max_tokens": 1}

    async with _client(stage, session) as client:
        await client.post("/messages/count_tokens", json=body(0))
        tracemalloc.start()
        try:
            for at in range(1, 4):
                assert (await client.post("/messages/count_tokens", json=body(at))).status_code == 200
                assert (await client.post("/messages", json=body(at + 100))).status_code == 400
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 2 * 2**20, f"{kept} bytes of {6 * len(json.dumps(body(1)))}"


async def test_text_prompts_that_grow_are_kept_once(stage: Stage) -> None:
    """Each is the whole of the one before it and more."""
    session = await stage.session()
    client = stage.client(session)
    text = "once upon a time " * 100
    tracemalloc.start()
    try:
        for turn in range(60):
            reply = await client.completions.create(model="m", prompt=text, max_tokens=2)
            text += reply.choices[0].text + f" turn {turn}. "
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [call.fork_cause for call in stage.calls(session)] == ["first"] + [""] * 59
    texts = [value for value in _texts_in(session.conversations._texts) if isinstance(value, str)]
    assert sum(map(len, texts)) < 3 * len(text)
    assert kept < 40 * 2**20


def _texts_in(value: Any, seen: set[int] | None = None) -> list[Any]:
    """All strings that a structure holds, each object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [one for part in inner for one in _texts_in(part, seen)]


async def test_short_references_to_a_long_reply_do_not_add_up(stage: Stage) -> None:
    """An item's id is 60 bytes and stands for a whole reply: what they come to is limited like the request itself."""
    stage.engine.script = {"replies": [{"text": "long " * 400}]}
    session = await stage.session()
    session.limits = session.limits.model_copy(update={"request_bytes": 100_000})
    client = stage.client(session)
    first = await client.responses.create(model="m", input="hi")
    item = {"type": "item_reference", "id": first.output[0].id}
    answer = {"role": "user", "content": "go on"}
    reply = await client.responses.create(model="m", input=[{"role": "user", "content": "hi"}, item, answer])
    assert reply.output_text and stage.calls(session)[-1].fork_cause == ""
    with pytest.raises(openai.BadRequestError, match="refers to are longer than 100000 bytes together"):
        await client.responses.create(model="m", input=[item, answer] * 400)


def test_a_call_that_never_gets_to_its_arguments_is_read_once(renderer: ChatRenderer) -> None:
    """The time a parser takes grows with the reply, not with its square."""
    tokenizer = renderer.tokenizer
    for text in (
        '<tool_call>\n{"name": "' + "x" * 60_000,
        "<tool_call>\n" + "{ " * 30_000,
        "<tool_call>" + " " * 60_000,
    ):
        ids = tokenizer.encode(text)
        parser = HermesParser(tokenizer, stops=(), tools=True)
        began = time.process_time()
        pieces = [piece for token in ids for piece in parser.feed([token])]
        pieces += parser.finish()
        assert time.process_time() - began < 3
        assert "".join(piece.text for piece in pieces) == text
        assert not any(isinstance(piece, ToolArguments) for piece in pieces)


def test_a_call_that_is_nested_too_deeply_is_text(renderer: ChatRenderer) -> None:
    text = '<tool_call>{"name": "f", "parameters": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>"
    parser = HermesParser(renderer.tokenizer, stops=(), tools=True)
    pieces = [*parser.feed(renderer.tokenizer.encode(text)), *parser.finish()]
    assert "".join(piece.text for piece in pieces) == text


def test_tools_are_found_by_the_names_that_a_choice_may_give_them() -> None:
    tools = [
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]},
        {"type": "function", "name": "read"},
        {"type": "custom", "name": "patch"},
    ]
    for choice, flat in (
        ({"type": "function", "name": "read"}, "fs__read"),
        ({"type": "function", "name": "fs__read"}, "fs__read"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ):
        request = ResponsesDialect().parse({"input": "x", "tools": tools, "tool_choice": choice})
        assert request.must_call == (flat,)


async def test_many_strangers_do_not_keep_a_session_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aglite serve` lets anybody in by whatever token; one who comes back after many others begins a new rollout."""
    monkeypatch.setattr(gateway_module, "EXTERNAL_SESSIONS", 8)
    stage.gateway.serve_open = True
    for at in range(20):
        async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=f"stranger-{at}", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[USER])
    assert len(stage.gateway.sessions) == 8
    states = [row["state"] for row in stage.store.rollouts()]
    assert sorted(states) == ["done"] * 12 + ["running"] * 8
    kept = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="stranger-19", max_retries=0)
    back = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="stranger-0", max_retries=0)
    await kept.chat.completions.create(model="m", messages=[USER])
    await back.chat.completions.create(model="m", messages=[USER])
    assert len(stage.store.rollouts()) == 21
    await asyncio.gather(kept.close(), back.close())


@pytest.mark.parametrize("header", ["x-api-key:  TOKEN \t", "authorization:   bearer   TOKEN  "])
async def test_white_space_around_a_token_is_no_part_of_it(stage: Stage, header: str) -> None:
    session = await stage.session()
    host, _, port = stage.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ["GET /v1/models HTTP/1.1", "host: x", "connection: close", header.replace("TOKEN", session.token)]
    writer.write(("\r\n".join(head) + "\r\n\r\n").encode())
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
