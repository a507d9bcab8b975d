"""Text completion with the official SDK."""

from __future__ import annotations

import openai
import pytest
from staging import Stage


async def test_text_in_text_out(stage: Stage) -> None:
    stage.engine.script = {"replies": [{"text": " upon a tïme <think>x</think>"}]}
    session = await stage.session()
    client = stage.client(session)
    reply = await client.completions.create(model="m", prompt="Once", logprobs=1)
    (choice,) = reply.choices
    assert choice.text == " upon a tïme <think>x</think>", "text completion knows no reasoning"
    assert choice.logprobs.token_logprobs == stage.engine.sent[0][2]
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert reply.usage.total_tokens == sum(map(len, stage.engine.sent[0][:2]))
    stream = await client.completions.create(model="m", prompt="Once", stream=True, stop="tïm")
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a "
    assert chunks[-1].choices[0].finish_reason == "stop" and len(chunks) > 3


async def test_text_that_goes_on_continues_the_tokens(stage: Stage) -> None:
    tokenizer = stage.renderer.tokenizer
    odd = [token for char in " hello world" for token in tokenizer.encode(char)]
    stage.engine.script = {"replies": [{"ids": odd, "finish": "length"}]}
    session = await stage.session()
    client = stage.client(session)
    first = await client.completions.create(model="m", prompt="Say:")
    text = "Say:" + first.choices[0].text + " and more"
    await client.completions.create(model="m", prompt=text)
    await client.completions.create(model="m", prompt=tokenizer.encode("other"))
    await client.completions.create(model="m", prompt=[*stage.engine.sent[1][0], *odd, 7])
    one, two, three, four = stage.calls(session)
    assert two.prompt_ids[: len(one.prompt_ids) + len(odd)] == one.prompt_ids + one.response_ids
    assert [call.fork_cause for call in (one, two, three, four)] == ["first", "", "new_thread", ""]
    assert (two.parent_id, three.parent_id, four.parent_id) == (one.id, None, two.id)
    assert four.prompt_ids.tolist() == [*stage.engine.sent[1][0], *odd, 7]
    said = [message["content"] for message in stage.store.messages(two)]
    assert said == ["Say:", " hello world", " and more"]


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], [-1], None, 5])
async def test_prompts_that_are_none(stage: Stage, prompt) -> None:
    session = await stage.session()
    with pytest.raises(openai.BadRequestError) as refused:
        await stage.client(session).post(
            "/completions", body={"model": "m", "prompt": prompt}, cast_to=openai.types.Completion
        )
    assert refused.value.param == "prompt"
