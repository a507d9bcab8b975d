"""Starting a supervisor in the background, and watching one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from aglite import shipped
from aglite.client import ControlClient, ControlError
from aglite.errors import AgliteError, RecipeError
from aglite.paths import RunDir

POLL_S = 0.1


def in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def say(line: str) -> None:
    print(line, flush=True)


def chosen_recipe() -> Path:
    """The recipe meant by `aglite up` alone: the folder we are in, or else one of those under ./recipes and those that
    come with aglite. On a terminal the person chooses, elsewhere RecipeError lists them."""
    if Path("recipe.yaml").is_file():
        return Path()
    offered = shipped.offered()
    if not offered:
        raise RecipeError("no recipe given, and none here", "write one with `aglite init`, then `aglite up FOLDER`")
    if not in_terminal():
        rows = "\n".join(f"  aglite up {name:<20}  {about}" for name, about in offered)
        raise RecipeError(f"which recipe?\n{rows}", "name one, or write one of your own with `aglite init FOLDER`")
    say("Recipes (or write one of your own: aglite init FOLDER)")
    for number, (name, about) in enumerate(offered, 1):
        say(f"  {number}  {name:<20}  {about}")
    return Path(offered[_number(len(offered)) - 1][0])


def _number(last: int) -> int:
    while True:
        try:
            answer = input(f"Which one? (1 to {last}, Enter for 1) ").strip()
        except EOFError:
            raise RecipeError("no recipe was chosen", "name one: aglite up RECIPE") from None
        if answer in ("", *map(str, range(1, last + 1))):
            return int(answer or 1)


def in_background(run: RunDir, arguments: list[str], *, fresh: bool) -> int:
    """Start `aglite up --headless ARGUMENTS` in a session of its own and return its pid once it answers.

    Its output goes to logs/supervisor.log and is shown here until then. Raises AgliteError if one runs already or the
    new one ends early; Ctrl-C ends the new one again.
    """
    running = ControlClient(run).pid
    if running is not None:
        raise AgliteError(
            f"a supervisor (process {running}) already runs in {run.path}",
            f"look at it with `aglite attach --dir {run.path}`, or end it first with `aglite down --dir {run.path}`",
        )
    # --fresh renames the run directory, logs and all: then the log waits beside it until the new one is there
    log = run.path.parent / f".{run.path.name}.{os.getpid()}.log" if fresh else run.logs / "supervisor.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = open(log, "ab", opener=_private)  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise AgliteError(
            f"cannot write in {run.path}: {error.strerror}",
            "choose another place with --dir, or call aglite in a folder that you may write to",
        ) from None
    with output, open(log, "rb") as shown:
        shown.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            [sys.executable, "-m", "aglite", "up", "--headless", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(child, run, shown)
        except KeyboardInterrupt:
            say("stopping what was started")
            child.terminate()
            child.wait()
            raise
        finally:
            if fresh:
                _put_log(log, run)
    return child.pid


def _private(path: str, flags: int) -> int:
    """Only the owner may read what is opened so."""
    return os.open(path, flags, 0o600)


def _wait_until_it_answers(child: subprocess.Popen[bytes], run: RunDir, shown: IO[bytes]) -> None:
    client = ControlClient(run)
    while True:
        ended = child.poll()
        lines = shown.read().decode(errors="replace")
        if ended is None:
            sys.stdout.write(lines)
            sys.stdout.flush()
        if ended is not None:
            _show_end(ended, lines)
        if client.pid == child.pid:
            try:
                client.status()
                return
            except ControlError:
                pass  # its file is there, its listener is not yet: ask again
        time.sleep(POLL_S)


def _show_end(code: int, lines: str) -> None:
    """Pass on what a supervisor said that ended while it was starting; a run that was already complete ends with 0."""
    (sys.stdout if code == 0 else sys.stderr).write(lines)
    sys.stdout.flush()
    sys.exit(code if code >= 0 else 1)


def _put_log(log: Path, run: RunDir) -> None:
    """Move the log of a `--fresh` start to its place; the child goes on writing into the same file."""
    if run.logs.is_dir():
        log.rename(run.logs / "supervisor.log")
    else:
        log.unlink()


def watch(run: RunDir, *, readonly: bool = False) -> int:
    """The terminal UI, and the last word after it; returns 1 if the run failed.

    When the person asks for it there, the run is stopped and waited for. `readonly`: only looking, nothing of the run
    can be changed.
    """
    from aglite.tui.app import AgliteApp
    from aglite.tui.widgets.notice import notice

    app = AgliteApp(run, readonly=readonly)
    wish = app.run()
    if wish == "stop":
        from aglite.cli.stop import down

        return down(run, now=False, on_line=say)
    if ControlClient(run).pid is not None:
        say(f"The run goes on. Come back with: aglite attach --dir {run.path}")
        return 0
    text, level = notice(app.snapshot)
    if text:
        say(text)
    return 1 if level == "error" else 0
