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


def test_forks_of_the_last_step() -> None:
    status = running()["status"]
    assert "calls " not in render(status, NOW)
    counts = {"continued": 40, "first": 16, "new_thread": 2, "edited": 3, "template": 0, "retokenised": 0}
    status["forks"] = [{"step": 7, **counts}]
    assert "calls       40 continued, 18 began a conversation, 3 edited (step 7)\n" in render(status, NOW)


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


def test_a_narrow_terminal_gets_narrow_lines() -> None:
    for scene in (running(), with_gpu(running())):
        lines = render(scene["status"], NOW, 40).splitlines()
        assert max(map(len, lines)) <= 40
        wide = render(scene["status"], NOW)
        assert "".join("".join(lines).replace("·", "").split()) == "".join(wide.replace("·", "").split())


def test_a_terminal_that_has_ascii_only(daemon: FakeDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aglite", "status"],
        cwd=daemon.run_dir.path.parents[1],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0 and "?" not in text
    assert "step        7 of 12  ==============----------" in text and "0.66 +- 0.31" in text


def test_following_ends_when_nobody_reads(daemon: FakeDaemon) -> None:
    """The run goes on, and so would its followers."""
    command = f"{sys.executable} -m aglite attach --json | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=daemon.run_dir.path.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "" and json.loads(done.stdout)["id"] == 1
