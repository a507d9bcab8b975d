"""Responses that a later request names: continued, referred to and looked at, from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from staging import Stage, running
from test_gateway_responses import TOOLS, WEATHER, call

NAMED = {"replies": [{"texts": [f"reply {number}" for number in range(9)]}]}


async def test_a_conversation_goes_on_by_the_id_of_its_last_response(stage: Stage) -> None:
    sampled = "<think>\nhm\n</think>\n\n" + call("weather", '{"city" : "Paris"}')
    stage.engine.script = {"replies": [{"texts": [sampled, "sunny", "bye"]}]}
    session = await stage.session()
    client = stage.client(session)
    options: dict[str, Any] = {"model": "m", "instructions": "be brief", "tools": TOOLS}
    first = await client.responses.create(input="weather?", **options)
    output: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sun"}
    second = await client.responses.create(input=[output], previous_response_id=first.id, **options)
    async with client.responses.stream(input="thanks", previous_response_id=second.id, **options) as stream:
        third = await stream.get_final_response()
    assert third.output_text == "bye" and third.previous_response_id == second.id
    calls = stage.calls(session)
    assert [record.fork_cause for record in calls] == ["first", "", ""]
    assert [record.parent_id for record in calls] == [None, calls[0].id, calls[1].id]
    messages = stage.store.messages(calls[2])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    # Two requests may go on from the same response.
    await client.responses.create(input="and?", previous_response_id=first.id, **options)
    assert stage.calls(session)[3].parent_id == calls[0].id


async def test_the_length_of_an_input_is_told_without_sampling(stage: Stage) -> None:
    stage.engine.script = NAMED
    session = await stage.session()
    client = stage.client(session)
    options: dict[str, Any] = {"model": "m", "instructions": "be brief", "tools": TOOLS}
    told = await client.responses.input_tokens.count(input="a", **options)
    first = await client.responses.create(input="a", **options)
    assert told.input_tokens == first.usage.input_tokens
    told = await client.responses.input_tokens.count(input="b", previous_response_id=first.id, **options)
    second = await client.responses.create(input="b", previous_response_id=first.id, **options)
    assert told.input_tokens == second.usage.input_tokens and len(stage.calls(session)) == 2
    with pytest.raises(openai.BadRequestError):
        await client.responses.input_tokens.count(input="b", previous_response_id="resp_x", **options)


async def test_instructions_hold_for_one_request(stage: Stage) -> None:
    stage.engine.script = NAMED
    session = await stage.session()
    client = stage.client(session)
    first = await client.responses.create(model="m", input="a", instructions="one")
    other = await client.responses.create(model="m", input="b", instructions="two", previous_response_id=first.id)
    await client.responses.create(model="m", input="c", previous_response_id=other.id)
    texts = [[m["content"] for m in stage.store.messages(record)] for record in stage.calls(session)]
    assert texts == [["one", "a"], ["two", "a", "reply 0", "b"], ["a", "reply 0", "b", "reply 1", "c"]]


async def test_responses_that_cannot_be_named(stage: Stage) -> None:
    session, other = await stage.session("r-1"), await stage.session("r-2")
    client = stage.client(session)
    unstored = await client.responses.create(model="m", input="a", store=False)
    theirs = await stage.client(other).responses.create(model="m", input="a")
    for reply_id in ("resp_nobody", unstored.id, theirs.id):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="b", previous_response_id=reply_id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(reply_id)
    stage.engine.failure = "it died"
    events = [{"type": "item_reference", "id": theirs.output[0].id}]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input=events)
    assert refused.value.param == "input"


async def test_a_run_that_keeps_no_messages_says_so(stage: Stage) -> None:
    stage.store.keep_messages = False
    client = stage.client(await stage.session())
    first = await client.responses.create(model="m", input="a")
    with pytest.raises(openai.BadRequestError, match="keeps no messages") as refused:
        await client.responses.create(model="m", input="b", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


async def test_items_by_reference(stage: Stage) -> None:
    """Some clients send the ids of items that the service has: the whole reply takes their place."""
    sampled = "<think>\nhm\n</think>\n\nlook\n" + call("weather", "{}")
    stage.engine.script = {"replies": [{"texts": [sampled, "sunny", "bye"]}]}
    session = await stage.session()
    client = stage.client(session)
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    for turn in range(3):
        reply = await client.responses.create(model="m", input=items, tools=[WEATHER])
        if turn == 0:
            thought, said, called = reply.output
            items += [{"type": "item_reference", "id": thought.id}, {"type": "item_reference", "id": said.id}]
            items += [called.to_dict()]
            items += [{"type": "function_call_output", "call_id": called.call_id, "output": "sun"}]
        else:
            items += [{"id": reply.output[0].id}, {"role": "user", "content": "more"}]
    assert [record.fork_cause for record in stage.calls(session)] == ["first", "", ""]


async def test_a_response_can_be_looked_at_again(stage: Stage) -> None:
    sampled = "<think>\nhm\n</think>\n\nlook\n" + call("apply_patch", {"input": "x"}) + call("mcp__files__read", {})
    stage.engine.script = {"replies": [{"texts": [sampled, "one two three"]}]}
    session = await stage.session()
    client = stage.client(session)
    given = await client.responses.create(model="any", input="a", tools=TOOLS)
    again = await client.responses.retrieve(given.id)
    assert [item.to_dict() for item in again.output] == [item.to_dict() for item in given.output]
    assert (again.status, again.model, again.created_at) == ("completed", "any", given.created_at)
    assert again.usage.total_tokens == given.usage.total_tokens
    cut = await client.responses.create(model="m", input="b", max_output_tokens=2, previous_response_id=given.id)
    again = await client.responses.retrieve(cut.id)
    assert (again.status, again.previous_response_id, again.max_output_tokens) == ("incomplete", given.id, 2)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(given.id)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.responses.delete(given.id)
    assert refused.value.status_code == 405 and "record" in str(refused.value)
    with pytest.raises(openai.BadRequestError):
        await client.responses.retrieve(given.id, stream=True)
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{stage.url}{session.path}/v1/responses/{given.id}"
        assert (await http.get(url)).status_code == 401
        headers = {"authorization": f"Bearer {session.token}"}
        assert (await http.get(f"{url}/more", headers=headers)).status_code == 404


async def test_a_served_conversation_outlives_the_server(tmp_path: Path, renderer) -> None:
    """`aglite serve`: the same token may go on with an earlier response after a restart."""
    reply_id = None
    for start in range(2):
        async with running(tmp_path, renderer) as stage:
            stage.gateway.serve_open = True
            stage.engine.script = {"replies": [{"text": f"reply {start}"}]}
            client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="me", max_retries=0)
            options: Any = {"previous_response_id": reply_id} if reply_id else {}
            reply = await client.responses.create(model="m", input=f"question {start}", **options)
            reply_id = reply.id
            stranger = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="you", max_retries=0)
            with pytest.raises(openai.BadRequestError):
                await stranger.responses.create(model="m", input="x", previous_response_id=reply_id)
            rollouts = stage.store.rollouts()
            asked = [stage.store.messages(one) for row in rollouts for one in stage.store.calls(row["id"])]
    texts = sorted([m["content"] for m in messages] for messages in asked)
    assert texts == [["question 0"], ["question 0", "reply 0", "question 1"]]


async def test_a_retry_gets_the_same_response(stage: Stage) -> None:
    session = await stage.session()
    headers = {"authorization": f"Bearer {session.token}"}
    url, body = f"{stage.url}{session.path}/v1/responses", {"model": "m", "input": "a", "tools": TOOLS}
    async with httpx.AsyncClient(timeout=60) as http:
        first = await http.post(url, json=body, headers=headers)
        again = await http.post(url, json=body, headers={**headers, "x-stainless-retry-count": "1"})
    assert again.json()["id"] == first.json()["id"] and again.json()["output"] == first.json()["output"]
    assert len(stage.calls(session)) == 1
