"""The real openai SDK, the gateway, the protocol, a real model worker: a random model that must answer in JSON or with
a tool call does so, every time, through an update too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field
from staging import Stage, running
from tiny import tiny_model

from aglite.config import TrainSampling, ValSampling
from aglite.engine.worker_client import WorkerClient
from aglite.gateway.renderers import load_renderer

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAY: Any = [{"role": "user", "content": "say hello"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": NOTHING}},
]


class Step(BaseModel):
    kind: Literal["a", "b"]
    sure: bool


class Plan(BaseModel):
    steps: list[Step] = Field(max_length=2)
    size: int = Field(ge=0, le=99)


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path, **engine: Any) -> AsyncIterator[Stage]:
    """A gateway in front of a worker that holds the model."""
    client = WorkerClient([sys.executable, "-m", "aglite.worker"], log_path=folder / "worker.log")
    await client.start()
    try:
        settings = {"context_length": 1024, "max_running": 8, "kv_tokens": 8192, "threads": 1, **engine}
        assert (await client.init(model, engine=settings)).constrains
        async with running(folder, load_renderer(model), context_length=1024) as stage:
            stage.gateway.engine = client
            yield stage
    finally:
        await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("sdk")
    async with serving(random_model(folder / "model", initializer_range=0.2), folder) as made:
        yield made


def random_model(folder: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_model(folder, config=config)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, **more)).save_pretrained(folder)
    return folder


@pytest.fixture
async def client(stage: Stage, request: pytest.FixtureRequest) -> openai.AsyncOpenAI:
    session = await stage.session(f"r-{request.node.name}", sampling=TrainSampling(temperature=1.0))
    return stage.client(session)


def recorded(stage: Stage) -> list[Any]:
    return [call for row in stage.store.rollouts() for call in stage.store.calls(row["id"])]


async def agrees(stage: Stage, calls: list[Any], temperature: float = 1.0) -> None:
    """Recorded log-probabilities are those that the engine computes anew, without any grammar."""
    rows = [[*call.prompt_ids, *call.response_ids] for call in calls]
    values = await stage.gateway.engine.logprobs(rows, temperature)
    for call, row in zip(calls, values, strict=True):
        assert call.logprobs.tolist() == pytest.approx(row[len(call.prompt_ids) - 1 :], abs=3e-4)


async def test_the_structured_output_helper(stage: Stage, client: openai.AsyncOpenAI) -> None:
    replies = await asyncio.gather(
        *(client.chat.completions.parse(model="m", messages=SAY, response_format=Plan) for _ in range(6)),
        client.chat.completions.create(model="m", messages=SAY, max_tokens=20),
    )
    plans = {reply.choices[0].message.parsed.model_dump_json() for reply in replies[:-1]}
    assert len(plans) > 1
    async with client.chat.completions.stream(model="m", messages=SAY, response_format=Plan) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert len(deltas) > 3 and Plan.model_validate_json("".join(deltas)) == final.choices[0].message.parsed
    calls = recorded(stage)[-8:]
    assert sorted(call.constrained for call in calls) == [False, *[True] * 7]
    await agrees(stage, calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_calls(stage: Stage, client: openai.AsyncOpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        ask: Any = {"model": "m", "messages": SAY, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        for _ in range(3):
            if stream:
                async with client.chat.completions.stream(**ask) as events:
                    reply = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(**ask, n=2)
            for one in reply.choices:
                (call,) = one.message.tool_calls
                assert one.finish_reason == "tool_calls" and not one.message.content
                assert call.function.name in (("weather",) if choice is named else ("weather", "stop"))
                schema = CITY if call.function.name == "weather" else NOTHING
                jsonschema.validate(json.loads(call.function.arguments), schema)


async def test_seeds_and_greedy(stage: Stage) -> None:
    for name, temperature in (("seed", 1.0), ("greedy", 0.0)):
        rule = ValSampling(temperature=temperature, seed=0)
        said = set()
        for attempt in (1, 2):
            session = await stage.session(f"r-{name}", sampling=rule, seed=7, attempt=attempt)
            create = stage.client(session).chat.completions.create
            form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}
            reply = await create(model="m", messages=SAY, response_format=form)
            jsonschema.validate(json.loads(reply.choices[0].message.content), CITY)
            said.add(reply.choices[0].message.content)
            await agrees(stage, stage.calls(session), temperature)
        assert len(said) == 1


async def test_an_update_in_the_middle_of_a_reply(tmp_path: Path) -> None:
    """With a model that takes its time: a tiny one may be done before it hears of the update."""
    schema: Any = {"type": "array", "items": CITY, "minItems": 10, "maxItems": 10}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 16}
    async with serving(random_model(tmp_path / "model", shape), tmp_path) as stage:
        engine = stage.gateway.engine
        for version in range(1, 11):  # on a busy machine, one of the four may still be done before it hears of it
            session = await stage.session(attempt=version, sampling=TrainSampling(temperature=1.0))
            create = stage.client(session).chat.completions.create
            before = (await engine.stats()).sampled_tokens
            stream = await create(model="m", messages=SAY, response_format=form, stream=True, n=4)
            while (stats := await engine.stats()).running and stats.sampled_tokens < before + 8:
                pass
            await engine.preempt()
            await asyncio.sleep(0.1)
            await engine.resume(version)  # type: ignore[attr-defined]
            texts = ["", "", "", ""]
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            for text in texts:
                jsonschema.validate(json.loads(text), schema)
            calls = stage.calls(session)
            if len(calls) == 4 and all(len(call.versions) == 2 for call in calls):
                break
        for call in calls:
            assert [each for each, _ in call.versions] == [version - 1, version] and call.constrained
        await agrees(stage, calls)


async def test_most_probable_tokens(stage: Stage, client: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "m", "messages": SAY, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    form: Any = {"type": "json_object"}
    for extra in ({}, {"response_format": form}):
        reply = await client.chat.completions.create(**ask, **extra)
        for one in reply.choices[0].logprobs.content:
            best, second = one.top_logprobs
            assert best.logprob >= second.logprob and best.logprob >= one.logprob


async def test_a_schema_that_cannot_be_enforced(client: openai.AsyncOpenAI) -> None:
    for strict in (True, False):
        for schema in ({"not": {}}, {"type": "nonsense"}):
            form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
            ask = client.chat.completions.create(model="m", messages=SAY, response_format=form, max_tokens=20)
            if not strict and "not" in schema:
                await ask  # the keyword is ignored
                continue
            with pytest.raises(openai.BadRequestError) as refused:
                await ask
            assert refused.value.param == "response_format" and "schema" in str(refused.value)


@pytest.mark.slow
@pytest.mark.skipif("AGLITE_DEMO_MODEL" not in os.environ, reason="AGLITE_DEMO_MODEL names no folder")
async def test_the_demo_model(tmp_path: Path) -> None:
    """A tokenizer with its own pre-tokeniser: llguidance sees the same bytes as the gateway."""
    async with serving(Path(os.environ["AGLITE_DEMO_MODEL"]), tmp_path, context_length=1024) as stage:
        session = await stage.session("r-demo", sampling=TrainSampling(temperature=0.7))
        client = stage.client(session)
        ask: Any = [{"role": "user", "content": "Plan two steps, as JSON: Grüße, 你好"}]
        replies = await asyncio.gather(
            client.chat.completions.parse(model="m", messages=ask, response_format=Plan),
            client.chat.completions.create(
                model="m", messages=ask, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
            ),
        )
        assert replies[0].choices[0].message.parsed is not None
        (call,) = replies[1].choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITY if call.function.name == "weather" else NOTHING)
        await agrees(stage, stage.calls(session), 0.7)
