"""Rollouts whose agents call the real gateway, with a scripted engine behind it."""

import asyncio
import json
import time

import httpx
import pytest
from bench import Bench, until
from staging import running
from tiny import tiny_model

from aglite.errors import EngineError
from aglite.gateway.renderers import load_renderer
from aglite.gateway.sessions import Session

AGENT = """
    import json, os, sys, urllib.request
    history = []
    def ask(text):
        history.append({"role": "user", "content": text})
        body = json.dumps({"model": "m", "messages": history, "max_tokens": 8}).encode()
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        history.append({"role": "assistant", "content": reply["content"]})
        return reply["content"]
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return load_renderer(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def stage(tmp_path, renderer):
    async with running(tmp_path, renderer) as made:
        yield made


def bench_on(stage, folder, body, **more):
    lines = "\n".join("    " + line for line in body.splitlines())
    return Bench(folder, f"{AGENT}\n{lines}", gateway=stage.gateway, store=stage.store, url=stage.url, **more)


async def test_calls_are_recorded_and_the_grader_sees_the_conversations(tmp_path, stage):
    grade = """
        import json
        def grade(task, rollout, workdir):
            history = json.loads((workdir / "history.json").read_text())
            assert rollout["calls"] == 3 and len(rollout["conversations"]) == 2, rollout
            assert rollout["messages"] == history, (rollout["messages"], history)
            assert [m["role"] for m in rollout["conversations"][0]] == ["user", "assistant"] * 2
            return 1
    """
    body = "ask('one')\nask('two')\nhistory.clear()\nask('three')\njson.dump(history, open('history.json', 'w'))"
    async with bench_on(stage, tmp_path, body, grade=grade) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, []), outcome
        row = bench.store.rollout(bench.last)
        assert row["calls"] == 3 and row["sampled_tokens"] > 0


async def test_the_token_is_dead_with_its_attempt(tmp_path, stage):
    leak = tmp_path / "leak.json"
    body = f"ask('one')\njson.dump(dict(os.environ), open({str(leak)!r}, 'w'))"
    async with bench_on(stage, tmp_path, body) as bench:
        assert (await bench.run()).state == "done"
    env = json.loads(leak.read_text())
    async with httpx.AsyncClient() as client:
        again = await client.post(
            env["OPENAI_BASE_URL"] + "/chat/completions",
            headers={"authorization": f"Bearer {env['OPENAI_API_KEY']}"},
            json={"messages": [{"role": "user", "content": "still here?"}]},
        )
    assert again.status_code == 401
    assert bench.store.rollout(bench.last)["calls"] == 1


async def test_an_agent_that_never_calls_is_graded_and_flagged(tmp_path, stage):
    async with bench_on(stage, tmp_path, "") as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, ["no_calls"])


async def test_the_limit_of_calls_is_the_cause(tmp_path, stage):
    async with bench_on(stage, tmp_path, "while True: ask('more')", limits={"calls": 2}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("failed", 0.25, ["limit:calls"])
        assert outcome.cause.startswith("calls: 2; then code 1: urllib.error.HTTPError: HTTP Error")
        assert bench.store.rollout(bench.last)["calls"] == 2


async def test_a_failing_engine_is_infrastructure_and_the_next_attempt_counts_alone(tmp_path, stage, monkeypatch):
    generate, failures = stage.engine.generate, iter([True, True])

    def fail(prompt_ids, params):
        if next(failures, False):
            raise EngineError("the model worker is gone")
        return generate(prompt_ids, params)

    monkeypatch.setattr(stage.engine, "generate", fail)
    async with bench_on(stage, tmp_path, "ask('one')\nask('two')") as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt, outcome.reward) == ("done", 3, 1.0)
        causes = [row["cause"] for row in bench.store.rollout_states(bench.last)]
        assert sum(cause.startswith("engine: ") and "model worker is gone" in cause for cause in causes) == 2
        assert bench.store.rollout(bench.last)["calls"] == 2


async def test_an_error_of_ours_that_the_agent_got_over_is_none(tmp_path, stage, monkeypatch):
    generate, failures = stage.engine.generate, iter([True])

    def fail(prompt_ids, params):
        if next(failures, False):
            raise EngineError("a hiccup")
        return generate(prompt_ids, params)

    monkeypatch.setattr(stage.engine, "generate", fail)
    body = "try: ask('one')\nexcept OSError: history.clear(); ask('one')"
    async with bench_on(stage, tmp_path, body) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("done", 1)


class Unhurried(Session):
    """One that is charged neither for what a busy machine takes to bring its first request nor for what comes after the
    hold."""

    asked = 0.0
    excused_s = 0.0
    is_over = False

    @property
    def held_s(self):
        now = time.monotonic()
        self.asked = self.asked or now
        if not self.exchanges and not self.is_over:
            self.excused_s = now - self.asked
        return super().held_s + (250.0 if self.is_over else self.excused_s)


async def test_time_in_front_of_a_closed_gate_is_not_the_agents(tmp_path, stage, monkeypatch):
    monkeypatch.setattr("aglite.gateway.gateway.Session", Unhurried)
    stage.gateway.gate.close()
    async with bench_on(stage, tmp_path, "ask('one')", limits={"wall_s": 1.5}) as bench:
        task = await bench.submit()
        await until(lambda: stage.gateway.gate.held)
        await asyncio.sleep(2.5)
        assert not task.done()
        stage.gateway.sessions.of_rollout(task.rollout_id).is_over = True
        stage.gateway.gate.open()
        assert (await task).state == "done"


async def test_kill_in_the_middle_of_a_call(tmp_path, stage):
    stage.gateway.gate.close()
    async with bench_on(stage, tmp_path, "ask('one')") as bench:
        task = await bench.submit()
        await until(lambda: stage.gateway.gate.held)
        bench.launcher.kill(task.rollout_id)
        assert (await task).state == "cancelled"
        assert stage.gateway.gate.held == 0
        assert len(stage.gateway.sessions) == 0


@pytest.mark.parametrize(("text", "flags", "reward"), [("git log", ["read_git"], 0.0), ("git diff", [], 1.0)])
async def test_what_the_model_asks_of_git_is_flagged(tmp_path, stage, text, flags, reward):
    stage.engine.script = {"replies": [{"text": text}]}
    async with bench_on(stage, tmp_path, "ask('one')", reward={"on_flag": {"read_git": "zero"}}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.flags, outcome.reward) == ("done", flags, reward)
