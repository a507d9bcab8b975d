"""`aglite up`, `eval` and `serve` with a vLLM of aglite's own (a stand-in) and a scripted trainer, as processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_vllm import ODD
from mini_run import SCRIPT, MiniRun
from openai import OpenAI

FAKE = Path(__file__).parents[1] / "helpers" / "fake_vllm.py"


class VllmRun(MiniRun):
    def __init__(self, folder, **recipe):
        super().__init__(folder, engine={"kind": "vllm", "context_length": 512}, **recipe)
        self.record = folder / "record.txt"
        (folder / "script.json").write_text(json.dumps({**SCRIPT, "record": str(self.record)}))
        self.set(record=str(self.record), token_s=0.02)

    @property
    def environment(self):
        return {**super().environment, "AGLITE_VLLM": f"{sys.executable} {FAKE} {self.folder / 'vllm.json'}"}

    def set(self, **settings):
        (self.folder / "vllm.new").write_text(json.dumps(settings))
        (self.folder / "vllm.new").rename(self.folder / "vllm.json")

    @property
    def memory(self):
        """The folder in memory that the run's vLLM was told of."""
        return Path(re.findall(r"--uds (\S+)/socket", self.record.read_text())[-1])

    def vllm_pid(self):
        return int(re.findall(r"vllm start (\d+)", self.record.read_text())[-1])


def test_a_run_survives_the_death_of_vllm_and_every_token_has_its_version(tmp_path):
    run = VllmRun(tmp_path, trainer={"steps": 3, "checkpoint_every": 1}, evaluation={"before": False})
    run.start()
    run.until(lambda store: store.checkpoints())
    os.kill(run.vllm_pid(), signal.SIGKILL)
    code, output = run.wait()
    assert code == 0, output
    assert "the vLLM server was killed by SIGKILL" in output and "starting again from the last checkpoint" in output
    record = run.record.read_text().splitlines()
    assert sum(line.startswith("vllm start") for line in record) == 2
    again = [line.split()[1].partition("?")[0] for line in record[-200:]]
    load = again.index("load")
    assert again[load + 1 : load + 6] == ["logprobs", "offload", "/wake_up", "export", "/collective_rpc"]
    store = run.store()
    names = [row["phase"] for row in store.phases()]
    at = names.index("sleeping")
    assert names[at - 1 : at + 4] == ["draining", "sleeping", "training", "syncing", "rollout"]
    updates = {}  # of the run's versions, as the stand-in counts them
    seen = set()
    for rollout in store.rollouts():
        for call in store.calls(rollout["id"]):
            versions = [version for version, count in call.versions for _ in range(count)]
            for token, version in zip(call.response_ids, versions, strict=True):
                seen.add(version)
                updates.setdefault(version, set()).add(token >= ODD)
    assert len(seen) >= 3 and all(len(kinds) == 1 for kinds in updates.values()), updates
    assert run.gone() and not run.memory.exists()


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    run = VllmRun(tmp_path)
    run.start()
    run.until(lambda store: store.rollouts())
    assert any("time.sleep(600)" in line for line in run.leftovers())  # vLLM's own child
    (run.memory / "weights").mkdir()
    (run.memory / "weights" / "model.safetensors").write_text("x")
    shared = Path("/dev/shm") / re.findall(r"shares (\S+)", run.record.read_text())[-1]
    assert shared.exists()
    run.kill()
    assert run.gone(), run.leftovers()
    deadline = time.monotonic() + 60
    while (run.memory.exists() or shared.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.memory.exists() and not shared.exists()


def test_eval_starts_vllm_on_the_checkpoint_and_no_trainer(tmp_path):
    run = VllmRun(tmp_path)
    result = run.aglite("eval", "recipe", "--json", "--set", "evaluation.tasks=2")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["n"] == 2
    assert "trainer" not in run.record.read_text() and "--enable-sleep-mode" not in run.record.read_text()
    assert not run.memory.exists()


def test_serve_starts_vllm(tmp_path):
    run = VllmRun(tmp_path)
    model = str(tmp_path / "model")
    command = run.command("serve", model, "--engine", "vllm", "--dir", str(tmp_path / "served"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=run.environment, cwd=tmp_path)
    try:
        line = next(line for line in process.stdout if line.startswith("serving"))
        client = OpenAI(base_url=re.search(r"http://\S+/v1", line).group(), api_key="x")
        messages = [{"role": "user", "content": "hello"}]
        assert client.chat.completions.create(model="m", messages=messages, max_tokens=4).usage.completion_tokens == 4
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not run.memory.exists()


def test_what_is_served_ends_with_vllm_and_says_what_to_do(tmp_path):
    run = VllmRun(tmp_path)
    command = run.command("serve", str(tmp_path / "model"), "--engine", "vllm", "--dir", str(tmp_path / "served"))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=run.environment, cwd=tmp_path
    )
    try:
        assert any(line.startswith("serving") for line in process.stdout)
        os.kill(run.vllm_pid(), signal.SIGKILL)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 1 and "the vLLM server was killed by SIGKILL" in said
    assert "start the same command again" in said
    assert not run.memory.exists()


def test_a_vllm_that_does_not_start_is_quoted(tmp_path):
    run = VllmRun(tmp_path)
    cause = "(EngineCore pid=7) ERROR 11-30 12:40:00 [core.py:1100] ValueError: the model has no such layer"
    traceback = ["(APIServer pid=6) Traceback (most recent call last):", *["  File x, line 1, in y"] * 30]
    end = "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above."
    run.set(die_at_start=[cause, *traceback, end, *[' - leaked function "f"'] * 30])
    code, output = run.up()
    assert code == 1 and "the vLLM server ended: ValueError: the model has no such layer" in output
    assert "starting again" not in output
    assert run.gone()
