"""Tab: the shells' own protocol, asked as they ask it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_run import DONE, FAILED

from aglite.paths import RunDir
from aglite.shipped import offered


@pytest.fixture
def tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What bash is offered after `aglite WORDS`, of which the last is being typed."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str) -> list[str]:
        environment = {
            **os.environ,
            "_AGLITE_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["aglite", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            [sys.executable, "-m", "aglite"], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.stderr == ""
        return done.stdout.split("\n")[:-1] if done.stdout.endswith("\n") else done.stdout.split("\n")

    return ask


def test_commands(tab) -> None:
    assert tab("ro") == ["rollouts"]
    assert set(tab("re")) == {"report", "resume", "retry"}


def test_rollouts_of_the_run_that_is_meant(tab, finished: RunDir) -> None:
    assert FAILED in tab("show", "r-") and DONE in tab("logs", "r-")
    assert tab("show", FAILED[:5]) == [FAILED]
    assert tab("show", "--dir", str(finished.path), FAILED[:5]) == [FAILED]
    assert tab("show", "--dir", "runs/nowhere", FAILED[:5]) == [""]


def test_runs(tab, finished: RunDir) -> None:
    assert tab("status", "--dir", "") == ["runs/words"]


def test_recipes_and_their_tasks(tab, tmp_path: Path) -> None:
    from aglite.new_recipe import write_recipe

    write_recipe(tmp_path / "recipes" / "mine")
    assert set(tab("up", "")) == {name for name, _ in offered()}
    assert tab("up", "recipes/") == ["recipes/mine"]
    assert tab("run", "recipes/mine", "--task", "ho") == ["hot"]
    assert tab("doctor", "instr") == ["instruct"]


def test_settings_models_and_states(tab) -> None:
    assert "trainer.steps=" in tab("up", "--set", "trainer.s")
    assert tab("up", "--set", "trainer.grad_") == ["trainer.grad_clip="]
    assert tab("model", "fetch", "smol") == ["smollm2-135m"]
    assert tab("rollouts", "--state", "gr") == ["grading"]
    assert tab("init", "--harness", "mini") == ["mini-swe-agent"]


def test_a_damaged_run_offers_nothing_and_says_nothing(tab, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "broken")
    run.path.mkdir(parents=True)
    run.db.write_bytes(b"no database" * 100)
    assert tab("show", "r-") == [""]


def test_zsh_is_told_what_the_rollouts_are(tmp_path: Path, finished: RunDir) -> None:
    environment = {
        **os.environ,
        "_AGLITE_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": f"aglite show {FAILED[:6]}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "aglite"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert FAILED in done.stdout and "failed" in done.stdout
