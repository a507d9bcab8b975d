"""`aglite run`, `aglite eval` and `aglite serve` with a scripted engine, as a person would call them."""

import json
import os
import re
import signal
import subprocess

import pytest
from mini_run import MiniRun
from openai import OpenAI

from aglite.store import Store


@pytest.fixture
def run(tmp_path):
    return MiniRun(tmp_path)


def test_run_tells_one_rollout(run):
    result = run.aglite("run", "recipe", "--task", "val-3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "user: val 3?" in result.stdout
    assert "call 1: first" in result.stdout and "call 2: continues call 1" in result.stdout
    assert re.search(r"reward 0\.\d\d", result.stdout)


def test_run_names_an_unknown_task(run):
    result = run.aglite("run", "recipe", "--task", "nope")
    assert result.returncode == 1
    assert "no task nope" in result.stderr and "Traceback" not in result.stderr


def test_eval_gives_pass_at_k_with_intervals(run):
    result = run.aglite("eval", "recipe", "--n", "3", "--json", "--set", "evaluation.tasks=4")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["n"] == 4 and len(found["rewards"]) == 4
    assert all(len(rewards) == 3 for rewards in found["rewards"].values())
    flat = [reward for rewards in found["rewards"].values() for reward in rewards]
    assert found["mean"] == pytest.approx(sum(flat) / 12)
    assert found["low"] <= found["mean"] <= found["high"]
    assert (
        set(found["pass@1"]) == set(found["pass@2"]) == set(found["pass@3"]) == {"mean", "stderr", "low", "high", "n"}
    )
    assert found["pass@1"]["mean"] <= found["pass@2"]["mean"] <= found["pass@3"]["mean"]
    assert found["model"] == str(run.folder / "model")


def test_eval_tells_the_ks_that_are_asked_for(run):
    result = run.aglite("eval", "recipe", "--k", "2", "--k", "3", "--json", "--set", "evaluation.tasks=2")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {name for name in found if name.startswith("pass@")} == {"pass@2", "pass@3"}
    assert all(len(rewards) == 3 for rewards in found["rewards"].values())
    refused = run.aglite("eval", "recipe", "--k", "4", "--n", "3")
    assert refused.returncode == 2 and "3 rollouts of a task say nothing about pass@4" in refused.stderr


def test_pass_at_k_stays_a_share(run):
    (run.folder / "recipe" / "uneven.py").write_text(
        "def grade(task, rollout, workdir):\n    return task['id'] == 'val-0'"
    )
    result = run.aglite(
        "eval", "recipe", "--json", "--set", "evaluation.tasks=4", "--set", "reward.grade=uneven.py:grade"
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["pass@1"]
    assert found["mean"] == 0.25 and 0 < found["low"] < 0.25 < found["high"] < 1


def test_eval_names_a_checkpoint_that_is_not_there(run):
    result = run.aglite("eval", "recipe", "--checkpoint", "runs/none/step-1")
    assert result.returncode == 1 and "no checkpoint at runs/none/step-1" in result.stderr


def test_serve_answers_any_client_and_records_it(run):
    where = run.folder / "served"
    server = subprocess.Popen(
        run.command("serve", str(run.folder / "model"), "--dir", str(where)),
        stdout=subprocess.PIPE,
        text=True,
        env=run.environment,
        cwd=run.folder,
    )
    try:
        line = next(line for line in server.stdout if line.startswith("serving"))
        url = re.search(r"http://\S+/v1", line).group()
        client = OpenAI(base_url=url, api_key="whatever")
        assert client.models.list().data
        messages = [{"role": "user", "content": "hello"}]
        reply = client.chat.completions.create(model="model", messages=messages, max_tokens=8)
        assert reply.usage.completion_tokens > 0
        control = json.loads((where / "control.json").read_text())
        assert control["pid"] == server.pid
    finally:
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(120) == 130
    store = Store.open(where / "aglite.db", readonly=True)
    (rollout,) = store.rollouts()
    (call,) = store.calls(rollout["id"])
    assert rollout["backend"] == "external"
    assert len(call.response_ids) == reply.usage.completion_tokens
    assert store.messages(call)[-1]["content"] == "hello"
