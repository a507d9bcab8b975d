"""A whole session in a real terminal: start, look, detach, come back, stop."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_run import MiniRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Terminal:
    """One tmux window of 80x24 with a shell in it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._socket = f"aglite-{uuid.uuid4().hex[:8]}"
        settings = [f"{name}={environment[name]}" for name in ("AGLITE_WORKER", "AGLITE_SCRIPT")]
        shell = ["env", *settings, "TERM=screen-256color", "PS1=$ ", "bash", "--norc"]
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", "-c", str(folder), *shell)

    def _tmux(self, *args: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def type(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait_for(self, *texts: str, seconds: float = 180) -> str:
        deadline = time.monotonic() + seconds
        while not all(text in (screen := self.screen) for text in texts):
            assert time.monotonic() < deadline, f"{texts} did not appear in:\n{screen}"
            time.sleep(0.2)
        return screen

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MiniRun]:
    run = MiniRun(tmp_path, trainer={"steps": 500}, script={"latency_s": 0.05, "train_s": 0.5})
    yield run
    subprocess.run(
        run.command("down", "--now", "--dir", str(run.run_dir.path)), cwd=tmp_path, env=run.environment, check=False
    )


@pytest.fixture
def terminal(run: MiniRun, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, run.environment)
    yield terminal
    terminal.close()


def test_from_start_to_stop(run: MiniRun, terminal: Terminal) -> None:
    aglite = f"{sys.executable} -m aglite"
    terminal.type(f"{aglite} up recipe", "Enter")
    screen = terminal.wait_for("● live", "● running", "step")
    assert all(len(line) <= 80 for line in screen.splitlines())
    terminal.type("p")
    terminal.wait_for("paused", "r resume")
    terminal.type("r")
    terminal.wait_for("p pause")
    for key, words in (("3", "applied"), ("4", "sandboxes"), ("5", "events"), ("6", "agent.command"), ("2", "⏎ open")):
        terminal.type(key)
        terminal.wait_for(words)
    terminal.type("Enter")
    terminal.wait_for("esc back", "calls", "messages")
    terminal.type("Escape")
    terminal.wait_for("⏎ open")
    terminal.type("d")
    terminal.wait_for("The run goes on.")
    assert run.client.status()["phase"] != "stopped"

    terminal.resize(200, 50)
    terminal.type(f"clear; {aglite} attach --readonly", "Enter")
    screen = terminal.wait_for("─ reward ─", "─ engine ─", "─ events ", "only looking")
    assert "p pause" not in screen
    terminal.type("q")  # without a question: nothing can be stopped from here
    terminal.wait_for("The run goes on.")

    terminal.type(f"clear; {aglite} attach", "Enter")
    terminal.wait_for("─ reward ─", "● live")
    terminal.type("c")
    terminal.wait_for("How many rollouts at once?")
    terminal.type("BSpace", "3", "Enter")  # in one go, as over SSH
    terminal.wait_for("3 at once ─")
    terminal.type("q")
    terminal.wait_for("Leave aglite?")
    terminal.type("s")
    terminal.wait_for("stopped; `aglite up` goes on")
    assert run.client.pid is None

    terminal.type(f"clear; {aglite} attach", "Enter")
    terminal.wait_for("■ not running", "Stopped after step")
    terminal.type("q")
    terminal.wait_for("Stopped after step", "\n$")


def test_it_is_there_again_when_the_run_is(run: MiniRun, terminal: Terminal) -> None:
    """A terminal that stays open sees the end of a supervisor and finds the next one."""
    aglite = f"{sys.executable} -m aglite"
    terminal.type(f"{aglite} up recipe --detach && {aglite} attach", "Enter")
    terminal.wait_for("● live")
    run.aglite("down", "--dir", str(run.run_dir.path))
    terminal.wait_for("■ not running", "Stopped after step")
    run.aglite("up", "recipe", "--detach", "--dir", str(run.run_dir.path))
    terminal.wait_for("● live", "● running")
    terminal.type("s")
    terminal.wait_for("Stop after this step?")
    terminal.type("y")
    terminal.wait_for("■ not running", "Stopped after step")
