"""Dialects are pure: anything goes in, a request or a named error comes out. And one whole rollout on a family of the
`renderers` package, with reasoning that the harness drops."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staging import running
from test_gateway_text import QWEN3_MARKERS
from tiny import TEMPLATE, tiny_model

from aglite.gateway.dialects.base import Problem, Request, RequestError
from aglite.gateway.dialects.chat import ChatDialect
from aglite.gateway.dialects.completions import CompletionsDialect
from aglite.gateway.renderers import load_renderer

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
FIELDS = """model messages role content tools tool_choice stop n stream stream_options max_tokens temperature logprobs
top_logprobs seed tool_calls function name arguments type text prompt response_format include_usage"""
NAMES = st.sampled_from(FIELDS.split())
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
LIKELY = st.fixed_dictionaries({"role": ROLES | JSON, "content": st.text(max_size=5) | JSON})
MESSAGE = LIKELY | st.dictionaries(NAMES, JSON)
BODY = st.dictionaries(NAMES, JSON).flatmap(
    lambda body: st.lists(MESSAGE, max_size=3).map(lambda messages: {**body, "messages": messages})
)


@settings(max_examples=400)
@given(st.sampled_from([ChatDialect(), CompletionsDialect()]), BODY | JSON)
def test_any_body(dialect, body) -> None:
    try:
        request = dialect.parse(body)
    except RequestError as error:
        assert error.param and error.message
        return
    assert isinstance(request, Request)
    orjson.dumps([request.messages, request.tools, request.asked], option=orjson.OPT_NON_STR_KEYS)
    for message in request.messages:
        assert isinstance(message["content"], str) and message["role"] in ("system", "user", "assistant", "tool")


@pytest.mark.parametrize("kind", ["invalid", "auth", "not_found", "limit", "held", "engine"])
def test_errors_have_the_shape_of_the_api(kind) -> None:
    error = orjson.loads(ChatDialect().error(Problem(400, kind, "what is wrong", "field", "code")))["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"].endswith("_error")


async def test_reasoning_that_the_harness_drops(tmp_path: Path) -> None:
    start = TEMPLATE.index("{% if loop.first")
    template = TEMPLATE[:start] + TEMPLATE[TEMPLATE.index("{% endif %}", start) + len("{% endif %}") :]
    folder = tiny_model(tmp_path / "m", markers=QWEN3_MARKERS, template=template, config={"model_type": "qwen3"})
    renderer = load_renderer(folder)
    assert renderer.family == "qwen3"
    rng = random.Random(1)
    text = "<think>\nlet me think about {}\n</think>\n\nAnswer {}"
    async with running(tmp_path, renderer) as stage:
        stage.engine.script = {"replies": [{"texts": [text.format(turn, turn) for turn in range(8)]}]}
        session = await stage.session()
        client = stage.client(session)
        messages: list = [{"role": "user", "content": "start"}]
        for turn in range(8):
            stream = turn % 2 == 1
            reply = await client.chat.completions.create(model="m", messages=messages, stream=stream)
            if stream:
                said, thought = "", ""
                async for chunk in reply:
                    delta = chunk.choices[0].delta
                    said += delta.content or ""
                    thought += getattr(delta, "reasoning_content", None) or ""
            else:
                said, thought = reply.choices[0].message.content, reply.choices[0].message.reasoning_content
            assert (said, thought) == (f"Answer {turn}", f"let me think about {turn}")
            back = {"role": "assistant", "content": said}
            if rng.random() < 0.5:
                back["reasoning_content"] = thought
            messages += [back, {"role": "user", "content": f"more {turn}"}]
        calls = stage.calls(session)
        assert [call.fork_cause for call in calls] == ["first", *[""] * 7]
        for before, after in itertools.pairwise(calls):
            known = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(known)] == known
