"""Every command: that it is there, says what is wrong, and ends with the right code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cli_done import Aglite
from fake_daemon import FakeDaemon

from aglite.doctor import Check
from aglite.errors import AgliteError, RecipeError
from aglite.paths import RunDir

COMMANDS = (
    """
up, attach, status, steps, down, pause, resume, rollouts, show, init, logs, shell, export, run, eval, serve, doctor,
model fetch, db check, db prune, db redact, db vacuum
""".replace("\n", " ")
    .strip()
    .split(", ")
)

RECIPE = """
name: words
model: smollm2-135m
tasks: {train: tasks.jsonl, val: tasks.jsonl}
agent: {command: [python, agent.py]}
reward: {grade: grade.py:grade}
trainer: {steps: 4}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes" / "words"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the rooms behind the commands; keeps what they were called with."""
    calls: dict[str, Any] = {}

    def stand_in(name: str, function: str, result: Any) -> None:
        def call(*args: Any, **named: Any) -> Any:
            calls.update(args=args, **named)
            if isinstance(result, BaseException):
                raise result
            return result

        module = types.ModuleType(name)
        setattr(module, function, call)
        monkeypatch.setitem(sys.modules, name, module)

    calls["put"] = stand_in
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(aglite: Aglite, command: str) -> None:
    done = aglite(*command.split(), "--help")
    assert done.returncode == 0
    assert f"aglite {command}" in done.stdout


def test_help_lists_every_command(aglite: Aglite) -> None:
    text = aglite("--help").stdout
    assert all(f" {command.split()[0]} " in text for command in COMMANDS)


@pytest.mark.parametrize(
    "args",
    [
        ["no-such-command"],
        ["up", "--steps", "0"],
        ["up", "--resume", "--fresh"],
        ["up", "--headless", "--detach"],
        ["up", "--json", "--detach"],
        ["show"],
        ["run", "recipes/words"],
        ["eval", "recipes/words", "--split", "test"],
        ["serve", "m", "--port", "70000"],
    ],
)
def test_bad_usage_ends_with_2(aglite: Aglite, recipe: Path, args: list[str]) -> None:
    done = aglite(*args)
    assert done.returncode == 2
    assert done.stderr and "Traceback" not in done.stderr


def test_bad_recipe_ends_with_2_and_names_the_mend(aglite: Aglite, recipe: Path) -> None:
    (recipe / "recipe.yaml").write_text(RECIPE.replace("steps", "stepz"))
    done = aglite("up", "recipes/words", "--headless")
    assert done.returncode == 2
    assert done.stderr.startswith("aglite: ")
    assert "trainer.stepz" in done.stderr and "did you mean steps?" in done.stderr
    assert "no recipe at recipes/nothing" in aglite("up", "recipes/nothing").stderr


def test_up_runs_the_supervisor_here_when_this_is_no_terminal(
    aglite: Aglite, recipe: Path, backend: dict[str, Any]
) -> None:
    backend["put"]("aglite.supervisor", "run", 0)
    done = aglite("up", "recipes/words", "--steps", "7", "--set", "trainer.lr=5e-5", "--set", "seed=3")
    assert done.returncode == 0, done.stderr
    loaded, run = backend["args"]
    assert (loaded.trainer.steps, loaded.trainer.lr, loaded.seed) == (7, 5e-5, 3)
    assert run.path == Path("runs/words") and backend["mode"] == "auto"
    aglite("up", "recipes/words", "--headless", "--fresh", "--dir", "elsewhere")
    assert backend["mode"] == "fresh" and backend["args"][1].path == Path("elsewhere")


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (0, 0),
        (1, 1),
        (130, 130),
        (AgliteError("no disk", "free some"), 1),
        (RecipeError("no"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(aglite: Aglite, recipe: Path, backend: dict[str, Any], result: Any, code: int) -> None:
    backend["put"]("aglite.supervisor", "run", result)
    done = aglite("up", "recipes/words", "--headless")
    assert done.returncode == code
    if isinstance(result, AgliteError):
        assert done.stderr.startswith(f"aglite: {result.message}\n  -> ") and result.mend in done.stderr


def test_traceback_only_when_asked_for(
    aglite: Aglite, recipe: Path, backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend["put"]("aglite.supervisor", "run", AgliteError("no disk", "free some"))
    monkeypatch.setenv("AGLITE_DEBUG", "1")
    with pytest.raises(AgliteError):
        aglite("up", "recipes/words", "--headless")


def test_up_alone_lists_recipes(aglite: Aglite, recipe: Path, backend: dict[str, Any]) -> None:
    backend["put"]("aglite.supervisor", "run", 0)
    done = aglite("up", "--headless")
    assert done.returncode == 2 and "args" not in backend
    assert "aglite up recipes/words " in done.stderr and "aglite up instruct " in done.stderr
    assert "follow a small instruction" in done.stderr and "aglite init FOLDER" in done.stderr


def test_run_eval_and_serve_pass_on_what_they_were_given(aglite: Aglite, recipe: Path, backend: dict[str, Any]) -> None:
    backend["put"]("aglite.try_one", "try_one", 1)
    assert aglite("run", "recipes/words", "--task", "t-1").returncode == 1
    assert backend["args"][1] == "t-1"
    interval = {"mean": 0.5, "stderr": 0.1, "low": 0.304, "high": 0.696, "n": 2}
    result = {**interval, "solved": 0.5, "lost": 1, "by_kind": {"list": 0.25}, "rewards": {"a": [1.0, 0.5], "bb": [0]}}
    backend["put"]("aglite.evaluate", "evaluate", {**result, "pass@1": interval})
    done = aglite("eval", "recipes/words", "--checkpoint", "runs/x/step-5", "--n", "4", "--json")
    assert json.loads(done.stdout) == {**result, "pass@1": interval}
    assert (str(backend["checkpoint"]), backend["n"], backend["split"]) == ("runs/x/step-5", 4, "val")
    assert aglite("eval", "recipes/words").stdout.splitlines() == [
        "mean reward  0.500  95%: 0.304 to 0.696, 2 tasks",
        "solved       50% of the rollouts",
        "pass@1       0.500  95%: 0.304 to 0.696, 2 tasks",
        "  list       0.250",
        "not graded   1 of the tasks",
        "a            1.00  0.50",
        "bb           0.00",
    ]
    backend["put"]("aglite.serve", "serve", 130)
    assert aglite("serve", "runs/x/step-5", "--port", "8000").returncode == 130
    assert (backend["args"], backend["port"]) == (("runs/x/step-5",), 8000)


def test_doctor(aglite: Aglite, backend: dict[str, Any]) -> None:
    found = [Check("python", "ok", "detail"), Check("models", "warning", "detail", "fetch one")]
    backend["put"]("aglite.doctor", "checks", found)
    done = aglite("doctor")
    assert done.returncode == 0
    assert "✓ python" in done.stdout and "-> fetch one" in done.stdout
    backend["put"]("aglite.doctor", "checks", [Check("disk", "error", "detail", "free some")])
    done = aglite("doctor", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == [{"name": "disk", "status": "error", "detail": "detail", "mend": "free some"}]


def test_pause_and_resume_reach_the_supervisor(aglite: Aglite, daemon: FakeDaemon) -> None:
    assert "is pausing" in aglite("pause").stdout
    assert "goes on" in aglite("resume").stdout
    assert [action for action, _ in daemon.posted] == ["pause", "resume"]


def test_pause_without_a_supervisor(aglite: Aglite, finished: RunDir) -> None:
    done = aglite("pause")
    assert done.returncode == 1
    assert done.stderr.startswith("aglite: no supervisor runs in runs/words\n  -> ")


def test_directory_that_is_no_run(aglite: Aglite, tmp_path: Path) -> None:
    done = aglite("down", "--dir", str(tmp_path))
    assert done.returncode == 1 and "is no run directory" in done.stderr


def test_attach_without_a_terminal_prints_the_events(aglite: Aglite, finished: RunDir) -> None:
    lines = aglite("attach").stdout.splitlines()
    assert [line[10:] for line in lines] == [
        "step        step 1 · reward 0.250 ± 0.50 · 2 rollouts · 4 tokens trained",
        "step        step 2 · reward 0.500 ± 0.50 · 2 rollouts · 4 tokens trained",
    ]


def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path: Path, daemon: FakeDaemon) -> None:
    # an attached pipe waits for events until it is interrupted
    child = subprocess.Popen(
        [sys.executable, "-m", "aglite", "attach"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout and child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130 and errors == ""
    assert os.path.exists(daemon.run_dir.control)
