"""Real agent programs, launched from a recipe that only names them, on a two-turn task that a scripted model solves.

Between the first token and the last there is an update of the policy. Whatever a program makes of its history: what
only appends continues the recorded tokens, and what is recorded is what the engine sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, until
from programs import GRADE, LIMITS, PROGRAMS, WRITE, Program, folder_of
from staging import Stage, running

from aglite.gateway.renderers import ChatRenderer
from aglite.training.samples import build_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TASK = '--Task KIWI 007:  write "forty-two" into the file answer.txt;\n 1.50 -x don\'t {{ask}} $HOME'


@contextlib.asynccontextmanager
async def bench_of(program: Program, stage: Stage, folder: Path, **agent: Any) -> AsyncIterator[Bench]:
    """A launcher whose recipe names the program."""
    place = folder_of(program.harness)
    path = {"harness_path": str(place)} if place else {}
    async with Bench(
        folder,
        grade=GRADE,
        gateway=stage.gateway,
        store=stage.store,
        url=stage.url,
        command=[],
        harness=program.harness,
        attempts=1,
        limits=LIMITS,
        **path,
        **agent,
    ) as bench:
        yield bench


def check_records(stage: Stage, bench: Bench) -> list[Any]:
    """Every token, log-probability and version that the engine sent is recorded, and nothing else. Returns the calls
    that have tokens."""
    calls = [call for call in stage.store.calls(bench.last, 1) if len(call.response_ids)]
    recorded = [(list(call.prompt_ids), list(call.response_ids), list(call.logprobs), call.versions) for call in calls]
    sent = []
    for prompt, ids, logprobs, versions in stage.engine.sent:
        spans = [[version, versions.count(version)] for version in sorted(set(versions))]
        sent.append((prompt, ids, list(array("f", logprobs)), spans))
    assert sorted(recorded) == sorted(sent)
    assert all(call.delivered for call in calls), "each reply is proven to have reached the program"
    return calls


async def updates(stage: Stage) -> None:
    """Two policy updates as the training loop makes them: one stops the program's first reply at a token and goes on
    after it, the other lets that reply finish and holds the next request."""
    gateway, engine = stage.gateway, stage.engine
    await until(lambda: engine.sent and len(engine.sent[0][1]) > 3, 120)
    gateway.gate.close()
    await engine.preempt()
    await asyncio.sleep(0.5)
    await engine.resume(1)
    gateway.gate.open()
    sampled = len(engine.sent[0][1])
    await until(lambda: len(engine.sent[0][1]) > sampled + 3)
    gateway.gate.close()
    assert await gateway.idle(30)
    await until(lambda: gateway.gate.held, 60)
    await asyncio.sleep(0.5)
    await engine.resume(2)
    gateway.gate.open()


@pytest.mark.parametrize("harness", PROGRAMS)
async def test_a_task_of_two_turns_with_updates_in_the_middle(
    harness: str, tmp_path: Path, renderer: ChatRenderer
) -> None:
    program = PROGRAMS[harness]
    async with running(tmp_path, renderer, context_length=65536) as stage:
        stage.engine.script = {
            "replies": [
                {"match": "it-is-written", "text": program.finish},
                {"match": "KIWI", "text": program.run(WRITE)},
            ],
            "latency_s": 0.02,
        }
        async with bench_of(program, stage, tmp_path) as bench:
            _, outcome = await asyncio.gather(updates(stage), bench.run({"instruction": TASK}))
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, []), (outcome, bench.log())
        calls = check_records(stage, bench)
        assert [call.fork_cause for call in calls] == ["first", ""]
        first, second = calls
        assert TASK in renderer.tokenizer.decode(first.prompt_ids), "the task arrives as it was written"
        assert [version for version, _ in first.versions] == [0, 1], "one reply by two policies"
        assert second.versions == [[2, len(second.response_ids)]]
        assert second.held_s > 0.4
        (sample,) = build_samples(calls)
        trained = len(first.response_ids) + len(second.response_ids)
        assert sample.trained_tokens == trained, "both turns in one sample, each token trained"


OVERFLOW = {
    # harness: (context, lines of output that overflow it, state it ends in, fork causes)
    "mini-swe-agent": (4096, 900, "failed", ["first"]),
    "openhands": (12288, 900, "done", ["first", "new_thread", "new_thread"]),
    "opencode": (16384, 1900, "failed", ["first", "new_thread", "new_thread"]),
    "codex": (16384, 1800, "failed", ["first"]),
    "claude-code": (32768, 3500, "failed", ["first"]),
}
LAST = r"(?:(?!<\|im_start\|>).)*<\|im_start\|>assistant\n$"
"""Until the end of the last message."""
SUMMARY = "So far: answer.txt is written."


@pytest.mark.parametrize("harness", PROGRAMS)
async def test_a_result_that_overflows_the_context(harness: str, tmp_path: Path, renderer: ChatRenderer) -> None:
    """Either the program shortens its history, in threads of their own, and goes on; or it ends, and what it left is
    graded. None of them hangs or tries for ever."""
    program = PROGRAMS[harness]
    context, lines, state, causes = OVERFLOW[harness]
    async with running(tmp_path, renderer, context_length=context) as stage:
        stage.engine.script = {
            "replies": [
                {"texts": [program.run(f"printf forty-two > answer.txt; seq 1000 {1000 + lines}")]},
                {"match": program.summarise + LAST, "text": SUMMARY},
                {"text": program.finish},
            ]
        }
        async with bench_of(program, stage, tmp_path) as bench:
            outcome = await bench.run({"instruction": "Task KIWI"})
        assert (outcome.state, outcome.reward, outcome.flags) == (state, 1.0, []), (outcome, bench.log())
        calls = check_records(stage, bench)
        assert [call.fork_cause for call in calls] == causes
        assert len(build_samples(calls)) == len(causes), "each thread is a sample of its own"


@pytest.mark.parametrize(
    ("harness", "context", "causes"),
    [
        # It summarises without tools at 80 % of the context, which is another thread; then goes on with the summary.
        ("codex", 16384, ["first", "", "", "", "edited", "edited", ""]),
        # It asks for the summary as one more turn, and goes on with that.
        ("claude-code", 40960, ["first", "", "", "", "", "", "", "", "new_thread"]),
    ],
)
async def test_a_context_that_fills_up_turn_by_turn_is_compacted(
    harness: str, context: int, causes: list[str], tmp_path: Path, renderer: ChatRenderer
) -> None:
    program = PROGRAMS[harness]
    lines = 300 if harness == "codex" else 600
    turns = 5 if harness == "codex" else 7
    async with running(tmp_path, renderer, context_length=context) as stage:
        stage.engine.script = {
            "replies": [
                {"match": program.summarise + LAST, "text": SUMMARY},
                {
                    "texts": [
                        program.run(f"printf forty-two > answer.txt; seq {turn}000 {turn * 1000 + lines}")
                        for turn in range(1, turns + 1)
                    ]
                },
                {"text": program.finish},
            ]
        }
        async with bench_of(program, stage, tmp_path) as bench:
            outcome = await bench.run({"instruction": "Task KIWI"})
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, []), (outcome, bench.log())
        calls = check_records(stage, bench)
        assert [call.fork_cause for call in calls] == causes
        assert SUMMARY in renderer.tokenizer.decode(calls[-1].prompt_ids), "it goes on with what the model summed up"
