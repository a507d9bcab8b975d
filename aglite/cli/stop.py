"""Ending a supervisor and waiting until it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aglite.client import ControlClient, ControlError, alive, read_control
from aglite.errors import AgliteError
from aglite.paths import RunDir

POLL_S = 0.3
PATIENCE_S = 600.0
NOW_S = 30.0
"""How long `--now` waits before it kills."""


def down(run: RunDir, *, now: bool, on_line: Callable[[str], None], patience_s: float = PATIENCE_S) -> int:
    """Ask the supervisor to stop and wait until its process is gone, saying what it waits for.

    With `now` a supervisor that does not answer is ended by signal.
    """
    client = ControlClient(run, timeout=5.0)
    control = read_control(run)
    if control is None or not alive(control["pid"]):
        on_line(f"nothing runs in {run.path}")
        return 0
    pid = control["pid"]
    try:
        client.post("stop", {"now": now})
    except ControlError as error:
        if error.reason in ("absent", "dead"):
            on_line("it had just ended")
            return 0
        if not now:
            raise
        on_line(f"process {pid} does not answer; ending it by signal")
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + (min(patience_s, NOW_S) if now else patience_s)
    _wait(client, pid, deadline, on_line)
    if alive(pid):
        if not now:
            raise AgliteError(
                f"process {pid} is still stopping after {patience_s / 60:.0f} minutes", "`aglite down --now` ends it"
            )
        on_line(f"process {pid} does not end; killing it (the run goes back to its last checkpoint)")
        _signal(pid, signal.SIGKILL)
        _wait(client, pid, time.monotonic() + 10, on_line)
    trains = run.recipe.is_file()  # `aglite serve` leaves nothing to go on with
    on_line(f"stopped; `aglite up` goes on with {run.path}" if trains else "stopped")
    return 0


def _wait(client: ControlClient, pid: int, deadline: float, on_line: Callable[[str], None]) -> None:
    known: tuple[str, str] | None = None
    while alive(pid) and time.monotonic() < deadline:
        try:
            status = client.status()
            state = (status["phase"], status.get("message") or "")
            step = f", step {status['step']} of {status['steps']}" if status["steps"] else ""
            text = state[1] or f"stopping ({state[0]}{step})"
        except ControlError:
            state, text = ("", ""), f"waiting for process {pid} to end"
        if state != known:
            on_line(text)
            known = state
        time.sleep(POLL_S)


def _signal(pid: int, number: int) -> None:
    """Signal the process if it is aglite's: a stale control.json may name a pid that is somebody else's by now."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # that of a process which waits to be collected is empty
        if command and b"aglite" not in command:
            raise AgliteError(f"process {pid} is not an aglite supervisor", "remove the stale control.json")
        os.kill(pid, number)
