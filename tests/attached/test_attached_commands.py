"""`aglite serve`, `eval`, `run` and `up` with engines that somebody else runs, as processes of their own."""

import asyncio
import json
import re
import signal
import sys

import pytest
from mini_run import MiniRun
from openai import AsyncOpenAI
from upstreams import ApiServer, VllmServer, said

from aglite.client import ControlClient
from aglite.gateway.tokenizer import TextTokenizer
from aglite.paths import RunDir
from aglite.store import Store


@pytest.fixture
def run(tmp_path):
    made = MiniRun(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()  # weights are not needed: they are the server's
    made.worker = {"AGLITE_WORKER": "no.such.worker"}  # nor is a model worker
    return made


@pytest.fixture
async def vllm(run):
    server = VllmServer(TextTokenizer(run.folder / "model"))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def endpoint():
    server = ApiServer(*[said({"content": f"reply {n}"}) for n in range(100)])
    await server.start()
    yield server
    await server.stop()


def settings(kind, server, **more):
    values = {"kind": kind, "url": server.url, **more}
    return [part for key, value in values.items() for part in ("--set", f"engine.{key}={value}")]


async def test_eval_on_a_vllm_server(run, vllm):
    result = await asyncio.to_thread(
        run.aglite, "eval", "recipe", "--json", "--set", "evaluation.tasks=4", *settings("vllm", vllm)
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["n"] == 4
    assert len(vllm.requests) == 2 + 4 * 2  # the probe, and two turns of each agent


async def test_run_on_an_endpoint_of_text(run, endpoint):
    options = settings("api", endpoint, model="big")
    result = await asyncio.to_thread(run.aglite, "run", "recipe", "--task", "val-3", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reply 0" in result.stdout and "reply 1" in result.stdout
    assert "call 2: continues call 1" in result.stdout


@pytest.mark.parametrize("kind", ["vllm", "api"])
async def test_up_refuses_what_it_cannot_train(run, vllm, kind):
    more = {"model": "big"} if kind == "api" else {}
    result = await asyncio.to_thread(run.aglite, "up", "recipe", "--headless", *settings(kind, vllm, **more))
    assert result.returncode == 2
    assert f"engine.kind: {kind} at a url cannot be trained" in result.stderr and "embedded" in result.stderr
    assert not run.run_dir.path.exists()


async def test_a_server_that_is_not_there_is_said_at_once(run):
    options = ["--set", "engine.kind=vllm", "--set", "engine.url=http://127.0.0.1:9"]
    result = await asyncio.to_thread(run.aglite, "eval", "recipe", *options)
    assert result.returncode == 1
    assert "vLLM at http://127.0.0.1:9 cannot be reached" in result.stderr and "Traceback" not in result.stderr


async def test_settings_that_do_not_go_together(run):
    for options, words in (
        (["engine.kind=vllm", "engine.model=m"], "engine.model: only for a server that runs already"),
        (["engine.kind=vllm", "engine.url=h"], "engine.url: 'h' is no address"),
        (["engine.kind=vllm", "engine.url=http://h", "engine.args=[--x]"], "engine.args: only for aglite's own vLLM"),
        (["engine.kind=api", "engine.url=http://h"], "engine.model: missing"),
        (["engine.url=http://h"], "engine.url: only for engine.kind vllm and api"),
    ):
        sets = [part for option in options for part in ("--set", option)]
        result = await asyncio.to_thread(run.aglite, "eval", "recipe", *sets)
        assert result.returncode == 2 and words in result.stderr


@pytest.mark.parametrize("kind", ["vllm", "api"])
async def test_serve_on_an_engine_that_runs_already(run, vllm, endpoint, kind):
    where = run.folder / "served"
    model = str(run.folder / "model") if kind == "vllm" else "big"
    server = vllm if kind == "vllm" else endpoint
    arguments = ["serve", model, "--engine-url", server.url, "--engine", kind, "--dir", str(where)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aglite", *arguments, stdout=asyncio.subprocess.PIPE, env=run.environment, cwd=run.folder
    )
    try:
        while (line := await process.stdout.readline()) and not line.startswith(b"serving"):
            pass
        url = re.search(r"http://\S+/v1", line.decode()).group()
        client = AsyncOpenAI(base_url=url, api_key="whatever")
        messages = [{"role": "user", "content": "hello"}]
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
        assert reply.choices[0].message.content and reply.usage.completion_tokens > 0
        control = json.loads((where / "control.json").read_text())
        assert control["pid"] == process.pid
        asked = ControlClient(RunDir(where))
        (listed,) = await asyncio.to_thread(asked.rollouts)
        detail = await asyncio.to_thread(asked.rollout, listed["id"])
        assert detail["call_rows"][0]["reply"]["content"] == reply.choices[0].message.content
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 130
    store = Store.open(where / "aglite.db", readonly=True)
    (rollout,) = store.rollouts()
    (call,) = store.calls(rollout["id"])
    assert store.reply(call)["content"] == reply.choices[0].message.content
    assert len(call.response_ids) == (8 if kind == "vllm" else 0)
