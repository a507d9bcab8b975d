"""The real worker process: engine, trainer and checkpoints over its socket."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from bench import is_running, until
from training_rows import message, random_rows

from aglite.engine.base import SamplingParams
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, EngineError

ENGINE = {"context_length": 256, "max_running": 8, "kv_tokens": 2048, "threads": 1}
LONG = 240
"""Tokens of a generation that something is to happen in the middle of: as many as the tiny model can."""
COMMAND = [sys.executable, "-m", "aglite.worker"]
PROMPT = [5, 6, 7, 8, 9]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def client_in(folder, **options):
    return WorkerClient(COMMAND, log_path=folder / "worker.log", **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tiny_model, tmp_path_factory):
    """A worker without a trainer, shared by the tests of sampling."""
    client = client_in(tmp_path_factory.mktemp("sampler"))
    await client.start()
    info = await client.init(tiny_model, engine=ENGINE)
    assert (info.context_length, info.vocab_size) == (256, 97)
    yield client
    await client.stop()


async def collect(stream, into=None):
    chunks = into if into is not None else []
    async for chunk in stream:
        chunks.append(chunk)
    return [token for chunk in chunks for token in chunk.token_ids], [x for chunk in chunks for x in chunk.logprobs]


async def until_longer(chunks, count):
    for _ in range(3000):
        if len(chunks) <= count:
            await asyncio.sleep(0.01)
    assert len(chunks) > count


async def test_many_generations_at_once_and_their_logprobs(sampler):
    before = await sampler.stats()
    params = SamplingParams(max_tokens=12, temperature=0.7)
    responses = await asyncio.gather(*(collect(sampler.generate([*PROMPT, 10 + i], params)) for i in range(6)))
    assert all(len(tokens) == len(logprobs) == 12 for tokens, logprobs in responses)
    rows = [[*PROMPT, 10 + i, *tokens] for i, (tokens, _) in enumerate(responses)]
    exact = await sampler.logprobs(rows, 0.7)
    for (_, recorded), values in zip(responses, exact, strict=True):
        assert values[len(PROMPT) :] == pytest.approx(recorded, abs=1e-4)
    after = await sampler.stats()
    assert after.sampled_tokens - before.sampled_tokens == 72 and after.running == 0


async def test_equal_seeds_draw_equal_tokens(sampler):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=4)
    alone, _ = await collect(sampler.generate(PROMPT, params))
    together = await asyncio.gather(
        collect(sampler.generate(PROMPT, params)),
        *(collect(sampler.generate([i] * 9, SamplingParams(max_tokens=8))) for i in range(3, 6)),
    )
    assert together[0][0] == alone


async def test_closing_a_stream_frees_its_place(sampler):
    before = await sampler.stats()
    streams = [sampler.generate(PROMPT, SamplingParams(max_tokens=LONG, temperature=1.0)) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()
    tokens, _ = await collect(sampler.generate(PROMPT, SamplingParams(max_tokens=3)))
    after = await sampler.stats()
    assert len(tokens) == 3 and after.running == 0 and after.sampled_tokens - before.sampled_tokens < 3 * LONG


async def test_preempted_generations_keep_their_tokens_and_go_on(sampler):
    params = SamplingParams(max_tokens=LONG, temperature=1.0, seed=1)
    undisturbed, _ = await collect(sampler.generate(PROMPT, params))
    for _ in range(20):  # on a busy machine, it may be done before it hears of it
        chunks = []
        task = asyncio.create_task(collect(sampler.generate(PROMPT, params), chunks))
        await until_longer(chunks, 3)
        await sampler.preempt()
        if (held := len(chunks)) < LONG:
            break
        await sampler.resume(0)
    await asyncio.sleep(0.3)
    assert len(chunks) == held < LONG
    late = asyncio.create_task(collect(sampler.generate(PROMPT, SamplingParams(max_tokens=2))))
    await asyncio.sleep(0.1)
    assert not late.done()
    await sampler.resume(5)
    tokens, _ = await task
    assert tokens == undisturbed
    assert {chunk.version for chunk in chunks[:held]} == {0} and {chunk.version for chunk in chunks[held:]} == {5}
    assert len((await late)[0]) == 2


async def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(sampler, tiny_model):
    with pytest.raises(EngineError, match="context"):
        await collect(sampler.generate([3] * 500, SamplingParams(max_tokens=1)))
    with pytest.raises(EngineError, match="only samples"):
        await sampler.train(message([], [], []))
    with pytest.raises(EngineError, match="holds a model already"):
        await sampler.init(tiny_model, engine=ENGINE)
    assert len((await collect(sampler.generate(PROMPT, SamplingParams(max_tokens=2))))[0]) == 2


async def test_a_worker_without_a_trainer_does_not_import_verl(sampler):
    maps = Path(f"/proc/{sampler.pid}/maps").read_text()
    assert "libtorch_cpu" in maps and "/ray/" not in maps


async def test_a_missing_model_is_named(tmp_path):
    client = client_in(tmp_path)
    await client.start()
    with pytest.raises(EngineError, match=r"config\.json"):
        await client.init(tmp_path / "nothing", engine=ENGINE)
    await client.stop()
    exit = await client.exited
    assert (exit.code, exit.stopped) == (0, True)


async def test_the_worker_ends_when_the_supervisor_dies(tmp_path):
    script = f"""
import asyncio, sys
from pathlib import Path
from aglite.engine.worker_client import WorkerClient
async def main():
    client = WorkerClient([sys.executable, "-m", "aglite.worker"], log_path=Path({str(tmp_path)!r}) / "log")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    worker = int(await supervisor.stdout.readline())
    assert is_running(worker)
    supervisor.kill()
    await supervisor.wait()
    await until(lambda: not is_running(worker))


@pytest.mark.slow
async def test_a_run_of_training(tiny_model, tmp_path):
    """Generate, train, checkpoint, die, resume: one long story, because loading verl takes seconds."""
    events = []
    client = client_in(tmp_path, on_event=lambda kind, data: events.append((kind, data)))
    await client.start()
    settings = {"lr": 1e-2, "tokens_per_micro_batch": 60, "kl": 0.0, "steps": 12}
    await client.init(tiny_model, engine=ENGINE, trainer=settings)
    assert [data["stage"] for kind, data in events if kind == "loading"][-1] == "done"

    async def gap():
        probe = [ids for ids, *_ in random_rows(30)]
        one, two = await client.logprobs(probe, 0.7), await client.logprobs(probe, 0.7, source="trainer")
        gaps = [abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
        return sum(gaps) / len(gaps), one

    start_gap, start_logprobs = await gap()
    assert start_gap < 1e-4

    rows = random_rows(20)
    recorded = await client.logprobs([ids for ids, *_ in rows], 0.7)
    batch = message(rows, recorded, [[list(range(8))]], lr=1e-2)
    chunks = []

    async def sample():
        """One reply after the other, until one has seen the update: a busy machine may hear late of either."""
        while not chunks or chunks[-1].version == 0:
            chunks.clear()
            await collect(client.generate(PROMPT, SamplingParams(max_tokens=LONG, temperature=1.0)), chunks)

    running = asyncio.create_task(sample())
    await until_longer(chunks, 2)
    training = asyncio.create_task(client.train(batch))
    queued = asyncio.create_task(collect(client.generate([*PROMPT, 11], SamplingParams(max_tokens=3))))
    result = await training
    assert result["applied"] and result["grad_norm"] > 0 and result["logprob_gap_max"] < 1e-4
    assert [data for kind, data in events if kind == "train"][-1] == {"done": result["micro_batches"]} | {
        "of": result["micro_batches"]
    }
    held = len(chunks)
    await client.resume(1)
    await running
    assert held < LONG and {chunk.version for chunk in chunks[:held]} <= {0} and chunks[-1].version == 1
    assert len((await queued)[0]) == 3

    after_gap, after_logprobs = await gap()
    assert after_gap < 1e-4
    assert (
        max(abs(a - b) for x, y in zip(start_logprobs, after_logprobs, strict=True) for a, b in zip(x, y, strict=True))
        > 0.01
    )

    await client.save(tmp_path / "step-1", {"step": 1})
    with pytest.raises(AgliteError, match="row 0"):
        await client.train(message([([5, 6], [1, 1], 1.0, 1.0)], [[0.0]], [[[0]]]))
    first = [await client.train(batch), await client.train(batch)]
    _, expected = await gap()
    stream = client.generate(PROMPT, SamplingParams(max_tokens=120))
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert (await client.exited).code == -9
    with pytest.raises(EngineError, match="SIGKILL"):
        await anext(stream)

    client = client_in(tmp_path)
    await client.start()
    await client.init(tiny_model, engine=ENGINE, trainer=settings)
    assert await client.load(tmp_path / "step-1") == {"step": 1}
    loaded_gap, loaded = await gap()
    assert loaded_gap < 1e-4 and loaded == after_logprobs
    await client.resume(1)
    again = [await client.train(batch), await client.train(batch)]
    assert [r["grad_norm"] for r in again] == [r["grad_norm"] for r in first]
    assert [r["loss"] for r in again] == [r["loss"] for r in first]
    assert (await gap())[1] == expected
    await client.stop()
