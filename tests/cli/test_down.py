"""`aglite down` against real processes that stop at once, slowly, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_done import Aglite
from fake_daemon import FakeDaemon, running

from aglite.cli import stop
from aglite.cli.stop import down
from aglite.errors import AgliteError
from aglite.paths import RunDir

SLEEPER = """
import signal, time  # aglite
signal.signal(signal.SIGTERM, {handler})
print("up", flush=True)
time.sleep(600)
"""


class Process:
    """A process that stands for the supervisor, next to a fake control API that speaks for it."""

    def __init__(self, run: RunDir, handler: str = "signal.SIG_DFL") -> None:
        code = SLEEPER.format(handler=handler)
        self.child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.child.stdout
        self.child.stdout.readline()
        self.daemon = FakeDaemon(run, running(), pid=self.child.pid)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.daemon.end()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "instruct")


@pytest.fixture
def process(run: RunDir) -> Iterator[Process]:
    process = Process(run)
    yield process
    process.close()


@pytest.fixture
def stubborn(run: RunDir) -> Iterator[Process]:
    """Ignores SIGTERM."""
    process = Process(run, "signal.SIG_IGN")
    yield process
    process.close()


def test_waits_until_the_process_is_gone_and_says_for_what(run: RunDir, process: Process) -> None:
    said: list[str] = []

    def stop() -> None:
        while not process.daemon.posted:
            time.sleep(0.02)
        process.daemon.scene["status"] |= {"phase": "training", "message": "training: micro-batch 2 of 9"}
        deadline = time.monotonic() + 60
        while "training: micro-batch 2 of 9" not in said and time.monotonic() < deadline:
            time.sleep(0.02)
        process.child.terminate()

    threading.Thread(target=stop).start()
    assert down(run, now=False, on_line=said.append) == 0
    assert process.child.poll() is not None
    assert process.daemon.posted == [("stop", {"now": False})]
    assert "training: micro-batch 2 of 9" in said
    assert said[-1] == "stopped"


def test_a_training_run_is_said_to_go_on_later(run: RunDir, process: Process) -> None:
    run.recipe.write_text("name: instruct")
    said: list[str] = []
    assert down(run, now=True, on_line=said.append, patience_s=0.5) == 0
    assert said[-1].startswith("stopped; `aglite up` goes on")


def test_gives_up_waiting_with_advice(run: RunDir, process: Process) -> None:
    with pytest.raises(AgliteError, match="still stopping"):
        down(run, now=False, on_line=lambda _: None, patience_s=0.5)
    assert process.child.poll() is None


def test_now_ends_one_that_does_not_answer_by_signal(run: RunDir, process: Process) -> None:
    process.daemon.go_silent()
    said: list[str] = []
    assert down(run, now=True, on_line=said.append) == 0
    assert process.child.wait(60) == -15
    assert "does not answer" in said[0]


def test_now_kills_one_that_ignores_everything(run: RunDir, stubborn: Process) -> None:
    assert down(run, now=True, on_line=lambda _: None, patience_s=0.5) == 0
    assert stubborn.child.wait(60) == -9


def test_silent_one_is_left_alone_without_now(run: RunDir, process: Process) -> None:
    process.daemon.go_silent()
    with pytest.raises(AgliteError, match="does not answer"):
        down(run, now=False, on_line=lambda _: None)
    assert process.child.poll() is None


def test_never_signals_a_process_that_is_not_ours(run: RunDir) -> None:
    other = subprocess.Popen(["sleep", "60"])
    run.create()
    run.control.write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "x", "pid": other.pid}))
    with pytest.raises(AgliteError, match="is not an aglite supervisor"):
        down(run, now=True, on_line=lambda _: None)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_one_that_ends_before_the_signal_is_no_error(
    run: RunDir, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when it is looked at, and gone when it is to be ended; collected by its parent, or not yet."""
    process.daemon.go_silent()
    process.child.kill()
    monkeypatch.setattr("aglite.client.alive", lambda pid: True)
    for collected in (False, True):
        if collected:
            process.child.wait()
        looks = iter([True])
        monkeypatch.setattr(stop, "alive", lambda pid, looks=looks: next(looks, False))
        said: list[str] = []
        assert down(run, now=True, on_line=said.append) == 0
        assert "does not answer" in said[0] and said[-1] == "stopped"


def test_nothing_to_stop_is_fine(aglite: Aglite, finished: RunDir) -> None:
    done = aglite("down")
    assert done.returncode == 0 and "nothing runs in" in done.stdout
