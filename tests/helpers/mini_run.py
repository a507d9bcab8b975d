"""A whole run that needs no model: a small recipe, a scripted engine, `aglite up` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from tiny import tiny_model

from aglite.client import ControlClient
from aglite.paths import RunDir
from aglite.store import Store

AGENT = """
import json, os, pathlib, sys, time, urllib.request
task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "max_tokens": 16}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": task["question"]}]
for turn in range(2):
    reply = ask(messages)
    messages += [reply, {"role": "user", "content": "again"}]
pathlib.Path("answer.txt").write_text(reply["content"] or "")
"""


def held(go: Path, *, after: int = 0, asking: bool = False) -> str:
    """AGENT, which between its two calls waits until `go` is there, so that a run is where a test wants it for as long
    as the test takes. The first `after` rollouts do not wait. `asking`: it goes on with further calls meanwhile."""
    count = f"""
go = pathlib.Path({str(go)!r})
file = os.open(go.with_name("begun"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
os.write(file, b".")
waits = os.fstat(file).st_size > {after}
"""
    meanwhile = 'ask([{"role": "user", "content": "well?"}])' if asking else "time.sleep(0.05)"
    wait = f"    while waits and not go.exists(): {meanwhile}\n"
    counted = AGENT.replace("messages = [{", f"{count}messages = [{{", 1)
    return counted.replace("    messages +=", f"{wait}    messages +=")


GRADE = """
import pathlib
def grade(task, rollout, workdir):
    pathlib.Path(workdir, "answer.txt").read_text()
    return 0.9 * int(rollout["id"][2:], 16) / 2**40
"""
"""No two rollouts have the same reward: what is trained does not hang on chance."""

SCRIPT = {"length": 6, "latency_s": 0.005, "train_s": 0.3}

STARTED: list[subprocess.Popen[str]] = []
"""Every `aglite up` of the tests of this process."""


class MiniRun:
    """A recipe folder, a run directory and the processes that train it. The update of step `held_step` ends only when
    `go` is called: before that the run is not over, however long a test takes to do what it wants to do meanwhile."""

    def __init__(
        self,
        folder: Path,
        *,
        program: str = AGENT,
        grade: str = GRADE,
        script: dict[str, Any] | None = None,
        held_step: int | None = None,
        **recipe: Any,
    ) -> None:
        self.folder = folder
        self.run_dir = RunDir(folder / "runs" / "mini")
        recipe_folder = folder / "recipe"
        recipe_folder.mkdir(parents=True)
        model = tiny_model(folder / "model")
        header = b"{}"
        (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)  # no tensors
        (recipe_folder / "agent.py").write_text(program)
        (recipe_folder / "grade.py").write_text(grade)
        for split in ("train", "val"):
            rows = [{"id": f"{split}-{n}", "public": {"question": f"{split} {n}?"}, "hidden": {}} for n in range(12)]
            (recipe_folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.recipe = {
            "name": "mini",
            "model": str(model),
            "tasks": {"train": "train.jsonl", "val": "val.jsonl"},
            "agent": {"command": ["python", "agent.py"], "limits": {"wall_s": 120}, "concurrency": 6},
            "reward": {"grade": "grade.py:grade"},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "groups_in_flight": 3},
            "trainer": {"steps": 3, "checkpoint_every": 1, "min_free_disk_mb": 0},
            "evaluation": {"tasks": 2, "every": 0},
        }
        for key, value in recipe.items():
            self.recipe[key] = {**self.recipe.get(key, {}), **value} if isinstance(value, dict) else value
        (recipe_folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe))
        waits = {} if held_step is None else {"train_waits": {str(held_step): str(folder / "go")}}
        (folder / "script.json").write_text(json.dumps(SCRIPT | waits | (script or {})))
        self.process: subprocess.Popen[str] | None = None
        self.worker: dict[str, str] = {}
        """Environment that starts another worker than the scripted one."""

    @property
    def environment(self) -> dict[str, str]:
        scripted = {"AGLITE_WORKER": "aglite.engine.scripted", "AGLITE_SCRIPT": str(self.folder / "script.json")}
        return {**os.environ, "PYTHONUNBUFFERED": "1", **(self.worker or scripted)}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "aglite", *arguments]

    def start(self, *options: str) -> None:
        """`aglite up` in the background."""
        up = self.command("up", str(self.folder / "recipe"), "--headless", "--dir", str(self.run_dir.path), *options)
        self.process = subprocess.Popen(
            up, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=self.folder
        )
        STARTED.append(self.process)

    def go(self) -> None:
        """Let go on what waits: a step that is held, agents that are `held` by this folder's `go`."""
        (self.folder / "go").touch()

    def wait(self, timeout: float = 240) -> tuple[int, str]:
        """Exit code and output of what `start` began."""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def up(self, *options: str, timeout: float = 240) -> tuple[int, str]:
        self.start(*options)
        return self.wait(timeout)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the supervisor, as the kernel would."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def aglite(self, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Another aglite command on this run."""
        command = self.command(*arguments)
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, cwd=self.folder, timeout=timeout
        )

    def json(self, *arguments: str) -> Any:
        """What another aglite command on this run answers with `--json`."""
        done = self.aglite(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def client(self) -> ControlClient:
        """Asks the run's supervisor, with patience for one that does not get a processor."""
        return ControlClient(self.run_dir, timeout=60)

    def store(self) -> Store:
        return Store.open(self.run_dir.db, readonly=True)

    def until(self, condition: Any, timeout: float = 180) -> Any:
        """Poll `condition(store)` until it is true."""
        deadline, ended = time.monotonic() + timeout, False
        while time.monotonic() < deadline:
            if self.run_dir.db.exists():
                try:
                    store = self.store()
                except Exception:
                    time.sleep(0.05)
                    continue
                try:
                    if found := condition(store):
                        return found
                finally:
                    store.close()
            assert not ended, self.process.communicate()[0]
            ended = self.process is not None and self.process.poll() is not None  # what it did last is looked at too
            time.sleep(0.05)
        raise AssertionError("the condition never came true")

    def calls_at_rest(self) -> int:
        """How many calls are written down when none was for a second: one that was answered already may still be."""
        deadline, calls = time.monotonic() + 60, -1
        while calls != (calls := sum(row["calls"] for row in self.store().rollouts(limit=100_000))):
            assert time.monotonic() < deadline, "calls go on and on"
            time.sleep(1)
        return calls

    def leftovers(self) -> list[str]:
        """Command lines of processes that belong to this run and still live."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = (process / "environ").read_bytes()
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.run_dir.path).encode() in environ and line.strip():
                found.append(line)
        return found

    def gone(self, timeout: float = 60) -> bool:
        """Whether every process of the run has ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.leftovers():
                return True
            time.sleep(0.1)
        return False


INTERRUPT = signal.SIGINT
