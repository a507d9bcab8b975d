"""What a run says on its way, as plain lines, JSON lines and bars: from a real run, and on a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
from fcntl import ioctl
from typing import Any

import pytest
from fake_daemon import NOW, running, with_gpu
from mini_run import MiniRun

from aglite.headless import now_line
from aglite.output import JsonLines, Output, choose


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert type(choose(as_json=True, stream=Terminal())) is JsonLines
    assert type(choose(as_json=False, stream=io.StringIO())) is Output
    bars = choose(as_json=False, stream=Terminal())
    bars.close()
    assert type(bars).__name__ == "Bars"
    monkeypatch.setenv("TERM", "dumb")
    assert type(choose(as_json=False, stream=Terminal())) is Output


def test_json_lines_of_a_run(tmp_path: Any) -> None:
    run = MiniRun(tmp_path, trainer={"steps": 2})
    run.start("--json")
    code, output = run.wait()
    assert code == 0, output
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["type"] for line in lines} >= {"event", "line"}
    events = [line for line in lines if line["type"] == "event"]
    kept = run.store().events(limit=10_000)
    assert [event["id"] for event in events] == [event["id"] for event in kept]
    assert [event["data"]["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert any("use it: aglite serve" in line["text"] for line in lines if line["type"] == "line")


def test_json_lines_tell_the_error_that_ends_a_run(tmp_path: Any) -> None:
    run = MiniRun(tmp_path, grade="def grade(task, rollout, workdir):\n    raise RuntimeError('no grades')\n")
    process = subprocess.run(
        run.command("up", "recipe", "--json"), capture_output=True, text=True, env=run.environment, cwd=run.folder
    )
    assert process.returncode == 1
    errors = [line for line in map(json.loads, process.stdout.splitlines()) if line.get("level") == "error"]
    assert "no grades" in errors[-1]["text"] and errors[-1]["data"]["mend"]
    assert "no grades" in process.stderr


def test_attach_follows_in_json_to_the_end(tmp_path: Any) -> None:
    run = MiniRun(tmp_path, trainer={"steps": 2})
    assert run.up()[0] == 0
    followed = run.aglite("attach", "--json", "--dir", str(run.run_dir.path))
    events = [json.loads(line) for line in followed.stdout.splitlines()]
    assert [event["id"] for event in events] == [event["id"] for event in run.store().events(limit=10_000)]
    assert {event["type"] for event in events} == {"event"}


def test_the_line_between_two_events_tells_what_the_ui_tells() -> None:
    status = with_gpu(running())["status"]
    status["gate"]["held"] = 3
    line = now_line(status, NOW)
    for part in (
        "rollout 0:34",
        "step 7 of 12",
        "eta 5:11",
        "policy v7",
        "checkpoint of step 7, 40s ago",
        "7 running",
        "gate open, 3 held",
        "63 tok/s",
        "KV 30%",
        "prefix hits 65%",
        "NVIDIA A100-SXM4-80GB",
        "61.0 GiB of 80.0 GiB",
        "CPU 97%",
        "RAM 4.6 GiB of 15.6 GiB",
        "disk 181 GiB free",
        "database 5.1 MiB",
    ):
        assert part in line, part
    assert "\n" not in line


def on_terminal(run: MiniRun, columns: int, *arguments: str) -> tuple[int, str]:
    """Run `aglite ARGUMENTS` on a terminal of its own; its exit code and all that it wrote."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        run.command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=run.folder,
        # what the environment says of the terminal's size goes before what the terminal says
        env={**run.environment, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    while True:
        if not select.select([ours], [], [], 240)[0]:
            process.kill()
            raise AssertionError(written.decode(errors="replace"))
        try:
            data = os.read(ours, 65536)
        except OSError:  # the last one has closed it
            data = b""
        if not data:
            break
        written += data
    os.close(ours)
    return process.wait(120), written.decode(errors="replace")


@pytest.mark.parametrize("columns", [100, 40])
def test_bars_where_there_is_a_terminal(tmp_path: Any, columns: int) -> None:
    run = MiniRun(tmp_path, script={"latency_s": 0.05, "train_s": 1.2}, trainer={"steps": 3})
    code, written = on_terminal(run, columns, "up", "recipe", "--headless")
    assert code == 0, written
    assert "step 3 · reward" in written and "use it: aglite serve" in written
    assert "step 1/3" in written or "step 2/3" in written
    assert written.rstrip().endswith("\x1b[?25h") or written.count("\x1b[?25l") <= written.count("\x1b[?25h")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    bars = [line for line in re.split(r"[\r\n]+", plain) if re.search(r"step \d/3", line) and "reward" not in line]
    assert bars and all(len(line) <= columns for line in bars)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Any) -> None:
    run = MiniRun(tmp_path, trainer={"steps": 2})
    command = f"{' '.join(run.command('up', 'recipe', '--json'))} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=run.environment,
        cwd=run.folder,
        timeout=240,
    )
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
    assert [row["step"] for row in run.store().steps()] == [1, 2]
