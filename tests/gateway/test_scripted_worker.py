"""The scripted engine as a process: the supervisor's client cannot tell it from a model worker."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from pathlib import Path

import pytest
from test_gateway_gate import until

from aglite.engine.base import SamplingParams
from aglite.engine.scripted import logprob_of
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, EngineError


async def start(folder: Path, model_dir: Path, script: dict) -> WorkerClient:
    (folder / "script.json").write_text(json.dumps(script))
    command = [sys.executable, "-m", "aglite.engine.scripted", "--script", str(folder / "script.json")]
    client = WorkerClient(command, log_path=folder / "log")
    await client.start()
    await client.init(model_dir, engine={"context_length": 256})
    return client


async def collect(client: WorkerClient, prompt: list[int], **params) -> tuple[list[int], list[float], list[int], str]:
    ids, logprobs, versions, reason = [], [], [], None
    async for chunk in client.generate(prompt, SamplingParams(**{"max_tokens": 10, "stop_token_ids": (2,), **params})):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.token_ids)
        reason = chunk.finish_reason
    return ids, logprobs, versions, reason


async def test_a_worker_without_a_model(tmp_path: Path, model_dir: Path, renderer) -> None:
    client = await start(
        tmp_path, model_dir, {"replies": [{"match": "hello", "text": "hi there"}], "latency_s": 0.03, "length": 240}
    )
    try:
        assert client.info.context_length == 256 and client.info.kind == "scripted"
        prompt = renderer.render([{"role": "user", "content": "hello"}], ())
        ids, logprobs, _, reason = await collect(client, prompt)
        assert ids == [*renderer.tokenizer.encode("hi there"), 2] and reason == "stop"
        assert logprobs == (await client.logprobs([prompt + ids], 1.0))[0][-len(ids) :]
        assert logprobs[0] == logprob_of(ids[0], len(prompt))
        assert (await collect(client, [5, 6], max_tokens=3))[3] == "length"
        assert await collect(client, [5, 6]) == await collect(client, [5, 6]), "made up, but always the same"
        assert (await collect(client, [5, 6], seed=1))[0] != (await collect(client, [5, 6], seed=2))[0]
        with pytest.raises(EngineError, match="does not fit"):
            await collect(client, list(range(300)))

        versions = []

        async def read() -> None:
            async for chunk in client.generate([7, 8], SamplingParams(max_tokens=240)):
                versions.append(chunk.version)

        reading = asyncio.create_task(read())  # for seconds, so that it is preempted in the middle
        await until(lambda: versions)
        await client.preempt()
        held = len(versions)
        await asyncio.sleep(0.1)
        assert len(versions) == held and not reading.done()
        await client.resume(3)
        await until(lambda: len(versions) > held)
        assert set(versions[:held]) == {0} and set(versions[held:]) == {3}
        reading.cancel()
        await asyncio.wait({reading})
        assert (await client.stats()).running == 0
    finally:
        await client.stop()
    assert client.exited.result().stopped


async def test_training_and_checkpoints_are_answered(tmp_path: Path, model_dir: Path) -> None:
    client = await start(tmp_path, model_dir, {})
    events = []
    client.on_event = lambda kind, data: events.append((kind, data))
    try:
        ids = [5, 6, 7, 8]
        row = {
            "ids": array("i", ids).tobytes(),
            "mask": bytes([0, 0, 1, 1]),
            "logprobs": array("f", [0, 0, *(logprob_of(ids[at], at) for at in (2, 3))]).tobytes(),
            "advantage": 1.0,
            "weight": 0.5,
            "rollout": 0,
        }
        result = await client.train({"rows": [row], "plan": [[[0]]], "temperature": 1.0, "lr": 1e-4})
        assert result["applied"] and result["trained_tokens"] == 2 and result["logprob_gap_max"] == 0.0
        assert events[-1] == ("train", {"done": 1, "of": 1, "stage": "step"})
        await client.save(tmp_path / "step-1", {"step": 1})
        assert (tmp_path / "step-1" / "tokenizer.json").is_file() and not (tmp_path / "step-1.tmp").exists()
        assert await client.load(tmp_path / "step-1") == {"step": 1}
        with pytest.raises(AgliteError, match="no checkpoint"):
            await client.load(tmp_path)
    finally:
        await client.stop()
