from __future__ import annotations

import json
import os
import subprocess
import sys

from cli_done import Aglite
from fake_daemon import NOW, FakeDaemon, empty, running, with_gpu

from aglite.cli.status import render
from aglite.paths import RunDir

HEAVY = {
    "typer",
    "click",
    "rich",
    "pydantic",
    "yaml",
    "textual",
    "torch",
    "numpy",
    "fastapi",
    "uvicorn",
    "httpx",
    "psutil",
}


def test_status_of_a_running_run_imports_next_to_nothing(daemon: FakeDaemon) -> None:
    code = (
        "import sys; from aglite.__main__ import main; sys.argv = ['aglite', 'status']; code = main();"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=daemon.run_dir.path.parents[1],
        env={**os.environ, "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stderr.split())
    assert "step        7 of 12" in done.stdout


def test_json_is_the_control_apis_answer(aglite: Aglite, daemon: FakeDaemon) -> None:
    done = aglite("status", "--json")
    assert json.loads(done.stdout) == daemon.scene["status"]


def test_finished_run_is_read_from_its_database(aglite: Aglite, finished: RunDir) -> None:
    done = aglite("status", f"--dir={finished.path}")
    assert done.returncode == 0, done.stderr
    assert "(not running)" in done.stdout
    assert "2 of 2" in done.stdout
    assert "0.35 (step 1) → 0.60 (step 2)" in done.stdout
    status = json.loads(aglite("status", "--dir", str(finished.path), "--json").stdout)
    assert status["pid"] is None and status["phase"] == "stopped"
    assert status["queue"]["done"] == 2
    assert status["checkpoint"]["step"] == 2


def test_without_a_directory_the_run_that_is_going_is_meant(
    aglite: Aglite, daemon: FakeDaemon, finished: RunDir
) -> None:
    assert aglite("status").stdout.startswith("run         instruct")
    daemon.end()
    assert aglite("status").stdout.startswith("run         words")


def test_no_run_anywhere(aglite: Aglite) -> None:
    done = aglite("status")
    assert done.returncode == 1
    assert done.stderr.startswith("aglite: no run found under ./runs\n  -> ")


def test_options_that_the_fast_path_does_not_know_reach_the_parser(aglite: Aglite) -> None:
    done = aglite("status", "--jsn")
    assert done.returncode == 2 and "--jsn" in done.stderr
    assert "Where a run stands" in aglite("status", "--help").stdout


def test_every_state_fits_a_screen() -> None:
    for scene in (running(), empty(), with_gpu(running())):
        lines = render(scene["status"], NOW).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100


def test_pause_and_gate_show() -> None:
    status = running()["status"]
    status |= {"phase": "training", "gate": {"state": "closed", "held": 3}, "message": "training: micro-batch 2 of 9"}
    text = render(status, NOW)
    assert "gate closed, 3 held" in text
    assert "note        training: micro-batch 2 of 9" in text


def test_where_nothing_is_trained_no_step_is_shown() -> None:
    text = render(empty()["status"] | {"steps": 0}, NOW)
    assert "no training" in text
    assert not any(line.startswith(("step", "reward", "validation")) for line in text.splitlines())
