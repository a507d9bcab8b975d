"""`aglite shell` as a person has it: a process of its own on a terminal of its own."""

import asyncio
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

from bench import Bench, until

from aglite.__main__ import main

AGENT = """
    import os, time
    open("begun", "w").write("x")
    print("begun", flush=True)
    while not os.path.exists("leave"): time.sleep(0.05)
"""


class Terminal:
    """A command on a terminal of 80 columns and 24 lines."""

    def __init__(self, *command):
        self.said = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "vt100"
            os.environ["PS1"] = "$ "
            os.execvp(command[0], command)
        self.resize(24, 80)

    def resize(self, rows, columns):
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self._terminal, text.encode())

    def read(self, pattern, timeout_s=90):
        """What was said up to where `pattern` is found, and the match; what is left is for the next."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < deadline, self.said
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended: {self.said}") from None
        self.said = self.said[found.end() :]
        return found

    def ask_until(self, command, answer):
        """Type a command again and again until it says this: what was done takes a moment to get there."""
        deadline = time.monotonic() + 90
        while True:
            self.type(f"{command}; echo as''ked\n")
            if answer in self.before(r"asked\r"):
                return
            assert time.monotonic() < deadline, f"{command} never said {answer}"

    def before(self, pattern):
        """What is said up to there."""
        found = self.read(f"(?s)(.*?)({pattern})")
        return found[1]

    def wait(self):
        """The exit code, and what else was said."""
        try:
            while data := os.read(self._terminal, 4096):
                self.said += data.decode(errors="replace")
        except OSError:
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._terminal)
        return code


async def running(bench):
    """A rollout whose agent has begun."""
    task = await bench.submit({"word": "tea"})
    bench.last = task.rollout_id
    log = bench.run_dir.rollout_log(bench.last, 1)
    await until(lambda: log.exists() and log.read_text())
    return task


def command(bench):
    return [sys.executable, "-m", "aglite", "shell", bench.last[:8], "--dir", str(bench.run_dir.path)]


def shell(bench):
    return Terminal(*command(bench))


async def test_it_is_beside_the_agent(tmp_path, place):
    grade = "def grade(task, rollout, workdir):\n    return float((workdir / 'made').read_text() == 'by hand\\n')\n"
    async with Bench(tmp_path, AGENT, grade=grade, env={"TOPIC": "{task.word}"}, **place) as bench:
        task = await running(bench)

        def session():
            terminal = shell(bench)
            terminal.read("Beside the agent of r-")
            terminal.type("echo in:$(basename $PWD):$(ls):$TOPIC:$TERM:$(id -u):; cat $AGLITE_TASK_FILE\n")
            found = terminal.read(r"in:work:agent.py\s+begun:tea:vt100:(\d+):")
            user = place.get("user", "1000:1000") if place else f"{os.getuid()}"
            assert found[1] == user.partition(":")[0]
            terminal.read('{"word": "tea"}')
            terminal.ask_until("stty size", "24 80")
            terminal.resize(33, 101)
            terminal.ask_until("stty size", "33 101")
            terminal.type("sh -c 'echo it sle\"\"eps; exec sleep 300'\n")
            terminal.read("it sleeps")
            terminal.type("\x03echo by hand >made; exit 7\n")
            return terminal.wait()

        assert await asyncio.to_thread(session) == 7
        assert not task.done(), "the agent went on"
        terminal = shell(bench)
        await asyncio.to_thread(terminal.read, "Beside the agent of r-")
        await asyncio.to_thread(terminal.type, "touch leave\n")
        assert await asyncio.to_thread(terminal.wait) != 0, "the shell ended with the agent"
        outcome = await task
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, []), bench.log()


async def test_the_terminal_is_as_before_and_no_key_was_shown(tmp_path, place):
    async with Bench(tmp_path, AGENT, **place) as bench:
        task = await running(bench)
        around = f'stty -g >{tmp_path}/before; "$@"; stty -g >{tmp_path}/after'
        terminal = Terminal("sh", "-c", around, "sh", *command(bench))

        def session():
            terminal.read("Beside the agent of r-")
            terminal.type("echo key:$OPENAI_API_KEY:\n")
            key = terminal.read(r"key:([0-9a-f]{16}):")[1]
            commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
            assert not any(key.encode() in line for line in commands)
            terminal.type("exit\n")
            terminal.wait()

        await asyncio.to_thread(session)
        assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()
        bench.launcher.kill(bench.last)
        await task


async def test_where_no_agent_runs_it_says_what_there_is(tmp_path):
    async with Bench(tmp_path, AGENT, concurrency=1) as bench:
        task = await running(bench)
        first, waiting = bench.last, await bench.submit()
        bench.last = waiting.rollout_id
        terminal = shell(bench)
        assert await asyncio.to_thread(terminal.wait) == 1
        assert re.search(r"has no agent that runs: it is queued\s+->\s+wait until it runs", terminal.said)
        for one in (waiting.rollout_id, first):
            bench.launcher.kill(one)
        await asyncio.wait({task, waiting})
        bench.last = first
        terminal = shell(bench)
        assert await asyncio.to_thread(terminal.wait) == 1
        assert "it is cancelled" in terminal.said and "aglite show" in terminal.said


async def test_a_rollout_of_somebody_elses(tmp_path):
    async with Bench(tmp_path, AGENT) as bench:
        await bench.store.add_rollout("r-0123456789", "t", bench._group, "train", "external")
        await bench.store.set_rollout_state("r-0123456789", "running", "", 1)
        bench.last = "r-0123456789"
        terminal = shell(bench)
        assert await asyncio.to_thread(terminal.wait) == 1
        assert "is not on this machine: external" in terminal.said


def test_it_needs_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aglite", "shell", "r-1", "--dir", str(tmp_path)])
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert main() == 1
    assert "needs a terminal" in capsys.readouterr().err
