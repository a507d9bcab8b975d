"""What `aglite show` says of a fork: traffic of a real gateway, read back from its store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from staging import Stage, running
from tiny import tiny_model

from aglite.cli.show import page
from aglite.gateway.renderers import ChatRenderer, load_renderer
from aglite.paths import RunDir
from aglite.show import rollout_detail
from aglite.tui.widgets.talk import Talk

USER = {"role": "user", "content": "How is the weather?"}
GO = {"role": "user", "content": "And tomorrow?"}
SUNNY = {"role": "assistant", "content": "It is sunny in Paris"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
async def exact(tmp_path: Path, renderer: ChatRenderer) -> AsyncIterator[Stage]:
    async with running(tmp_path, renderer) as stage:
        yield stage


@pytest.fixture
async def rerender(tmp_path: Path, renderer: ChatRenderer) -> AsyncIterator[Stage]:
    async with running(tmp_path, renderer, continuation="rerender") as stage:
        yield stage


def characters(stage: Stage, text: str) -> list[int]:
    """Tokens that encoding the text would not give: its characters one by one."""
    return [i for char in text for i in stage.renderer.tokenizer.encode(char)] + [stage.renderer.stop_ids[0]]


async def converse(stage: Stage, *requests: dict[str, Any]) -> dict[str, Any]:
    """Send requests one after another; the rollout as `aglite show` reads it from the database."""
    session = await stage.session()
    client = stage.client(session)
    for request in requests:
        await client.chat.completions.create(model="m", **request)
    await stage.store.set_meta("model_dir", stage.renderer.tokenizer.name_or_path)
    return rollout_detail(stage.store, RunDir(stage.store.path.parent), session.rollout_id)


def shown(detail: dict[str, Any]) -> str:
    return "\n".join(page(detail, tokens=False))


def spelled(tokens: list[list[Any]]) -> list[str]:
    return [text for _, text in tokens]


async def test_an_edited_reply_is_compared_word_by_word(exact: Stage) -> None:
    exact.engine.script = {"replies": [{"texts": ["It is sunny in Paris", "Rain, so take a coat", "ok"]}]}
    rain = {"role": "assistant", "content": "Rain, so take a coat"}
    edited = {"role": "assistant", "content": "Rain, so take an umbrella"}
    detail = await converse(
        exact,
        {"messages": [USER]},
        {"messages": [USER, SUNNY, GO]},
        {"messages": [USER, SUNNY, GO, edited, USER]},
    )
    first, second, third = detail["call_rows"]
    assert third["fork_cause"] == "edited" and first["fork_diff"] is second["fork_diff"] is None
    diff = third["fork_diff"]
    assert diff["against"] == second["id"] != third["matched_id"], "the call whose reply was edited"
    assert diff["message"] == {
        "index": 3,
        "roles": ["assistant", "assistant"],
        "before": ["Rain, so take ", "a coat", ""],
        "after": ["Rain, so take ", "an umbrella", ""],
    }
    assert diff["tokens"]["reply_of"] == second["id"] and not diff["tokens"]["same_text"]
    whole = exact.store.calls(detail["id"])
    at = diff["tokens"]["position"]
    was = (whole[1].prompt_ids + whole[1].response_ids).tolist()
    assert was[:at] == whole[2].prompt_ids[:at].tolist() and was[at] != whole[2].prompt_ids[at]
    assert diff["tokens"]["after"][0][0] == whole[2].prompt_ids[at]
    text = shown(detail)
    assert "the first difference to call 2:" in text
    assert "- assistant: Rain, so take ⟦a coat⟧" in text and "+ assistant: Rain, so take ⟦an umbrella⟧" in text
    assert "in the reply of call 2 (message 4)" in text
    assert rain["content"] in text


async def test_the_same_text_split_differently(rerender: Stage) -> None:
    rerender.engine.script = {"replies": [{"ids": characters(rerender, "hello world")}, {"text": "ok"}]}
    hello = {"role": "assistant", "content": "hello world"}
    detail = await converse(rerender, {"messages": [USER]}, {"messages": [USER, hello, GO]})
    first, second = detail["call_rows"]
    assert second["fork_cause"] == "retokenised"
    tokens = second["fork_diff"]["tokens"]
    assert second["fork_diff"]["message"] is None and second["fork_diff"]["against"] == first["id"]
    assert tokens["same_text"] and tokens["position"] == first["prompt_tokens"]
    assert (tokens["reply_of"], tokens["message"]) == (first["id"], 1)
    assert spelled(tokens["before"]) == list("hello world") and spelled(tokens["after"]) == ["he", "llo", " world"]
    where = f"token {first['prompt_tokens'] + 1}, in the reply of call 1 (message 2): the same text, split differently"
    assert where in shown(detail)
    assert any("the same text, split differently" in line.plain for line in Talk(detail).layout(200))
    assert "⟦h│e│l│l│o│ │w│o│r│l│d│⟧" in shown(detail) and "⟦he│llo│ world│⟧" in shown(detail)


async def test_what_the_template_leaves_out(rerender: Stage) -> None:
    rerender.engine.script = {"replies": [{"text": "It is sunny "}, {"text": "ok"}]}
    stripped = {"role": "assistant", "content": "It is sunny"}
    detail = await converse(rerender, {"messages": [USER]}, {"messages": [USER, stripped, GO]})
    diff = detail["call_rows"][1]["fork_diff"]
    assert detail["call_rows"][1]["fork_cause"] == "template"
    assert diff["message"] is None, "the agent saw the same text"
    assert spelled(diff["tokens"]["before"])[0] == " " and spelled(diff["tokens"]["after"])[0] == "<|im_end|>"


async def test_exact_continuation_has_none_of_these(exact: Stage) -> None:
    exact.engine.script = {"replies": [{"ids": characters(exact, "It is sunny in Paris ")}, {"text": "ok"}]}
    detail = await converse(exact, {"messages": [USER]}, {"messages": [USER, SUNNY, GO]})
    assert [call["fork_cause"] for call in detail["call_rows"]] == ["first", ""]
    assert "difference" not in shown(detail)


async def test_other_tools(exact: Stage) -> None:
    exact.engine.script = {"replies": [{"text": "It is sunny in Paris"}]}
    detail = await converse(exact, {"messages": [USER]}, {"messages": [USER], "tools": [TOOL]})
    diff = detail["call_rows"][1]["fork_diff"]
    assert diff["tools"] == [[], ["weather"]] and diff["message"] is None
    assert "# Tools" in "".join(spelled(diff["tokens"]["context"] + diff["tokens"]["after"]))
    assert "- tools: none" in shown(detail) and "+ tools: weather" in shown(detail)


async def test_a_compacted_history(exact: Stage) -> None:
    exact.engine.script = {"replies": [{"text": "It is sunny in Paris"}]}
    system = {"role": "system", "content": "Be brief."}
    long = {"role": "user", "content": "Summary: " + "the weather was asked about. " * 30}
    detail = await converse(exact, {"messages": [system, USER]}, {"messages": [system, USER, long]})
    diff = detail["call_rows"][1]["fork_diff"]
    assert detail["call_rows"][1]["fork_cause"] == "edited" and diff["message"]["index"] == 2
    assert diff["message"]["roles"] == ["assistant", "user"]
    assert "more characters" in diff["message"]["after"][1]
    assert all(len(line) < 300 for line in shown(detail).splitlines() if "⟦" in line)


async def test_rewritten_arguments_are_not_blamed(exact: Stage) -> None:
    """What the gateway takes for the same message is not shown as the difference."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "day": 1}}\n</tool_call>'
    exact.engine.script = {"replies": [{"texts": [call, "sunny", "ok"]}]}
    session = await exact.session()
    client = exact.client(session)
    first = await client.chat.completions.create(model="m", messages=[USER], tools=[TOOL])
    again = first.choices[0].message.model_dump(exclude_none=True)
    again["tool_calls"][0]["function"]["arguments"] = json.dumps({"day": 1, "city": "Paris"}, indent=1)
    result = {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "sun"}
    history = [USER, again, result]
    await client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    edited = [*history, {"role": "assistant", "content": "cloudy"}, GO]
    await client.chat.completions.create(model="m", messages=edited, tools=[TOOL])
    detail = rollout_detail(exact.store, RunDir(exact.store.path.parent), session.rollout_id)
    diff = detail["call_rows"][2]["fork_diff"]
    assert (diff["message"]["index"], diff["message"]["before"][1], diff["message"]["after"][1]) == (
        3,
        "sunny",
        "cloudy",
    )
    assert diff["tokens"]["before"][0][1] is None, "no model folder is known: ids only"
    assert str(diff["tokens"]["before"][0][0]) in shown(detail)


async def test_a_run_that_keeps_tokens_only(rerender: Stage) -> None:
    rerender.store.keep_messages = False
    rerender.engine.script = {"replies": [{"ids": characters(rerender, "hello world")}, {"text": "ok"}]}
    hello = {"role": "assistant", "content": "hello world"}
    detail = await converse(
        rerender, {"messages": [USER]}, {"messages": [USER, hello, GO]}, {"messages": [GO, hello, USER]}
    )
    retokenised, edited = (call["fork_diff"] for call in detail["call_rows"][1:])
    assert retokenised["tokens"]["same_text"] and retokenised["tokens"]["message"] is None
    assert edited["message"] is None and edited["tokens"]["position"] > 0
    assert "in the reply of call 1: the same text" in shown(detail)
