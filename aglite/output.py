"""What a run says on its way: plain lines, JSON lines, or lines above progress bars. The supervisor speaks through it,
and so does whoever follows a run from elsewhere without the terminal UI."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from aglite import headless, strict_json, units

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """Plain lines, handed to `write` one by one.

    Lines are said as long as they can be said: a closed terminal, a closed pipe or a full disk does not end a run. All
    that matters is among the events in the store, too.
    """

    every_s = 60.0
    """How often it wants the status."""
    tells_errors = False
    """Whether it says the error that ends a run itself: whoever started the run says it in words."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self.unheard = False
        """Whether nobody hears it any more."""

    def __call__(self, line: str) -> None:
        """Say a line that is no event: what is being loaded, where a checkpoint is."""
        self._put(line)

    def _put(self, text: str) -> None:
        try:
            self._write(text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.unheard = True

    def event(self, event: dict[str, Any]) -> None:
        """Say an event of the run."""
        if (text := headless.line(event)) is not None:
            self(text)

    def status(self, status: dict[str, Any]) -> None:
        """Say where the run stands."""
        if status["phase"] not in ("starting", "stopped"):
            self(headless.now_line(status, time.time()))

    def close(self) -> None:
        """Say nothing more."""


class JsonLines(Output):
    """One JSON object a line: `{"type": "event" | "status", ...}` as the control API has them, and `{"type": "line",
    "at", "text"}` for what is neither."""

    every_s = 10.0
    tells_errors = True

    def __call__(self, line: str) -> None:
        self._say("line", {"at": time.time(), "text": line})

    def event(self, event: dict[str, Any]) -> None:
        self._say("event", event)

    def status(self, status: dict[str, Any]) -> None:
        self._say("status", {key: value for key, value in status.items() if key != "log"})

    def _say(self, kind: str, value: dict[str, Any]) -> None:
        self._put(strict_json.dumps({"type": kind, **value}))


class Bars(Output):
    """Lines, and below them bars for the run and for what it is doing, on a terminal that can move its cursor."""

    every_s = 1.0

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(None), TextColumn("{task.fields[text]}"))
        self._bars = Progress(*columns, console=console, auto_refresh=False, transient=True, expand=True)
        self._run = self._bars.add_task("starting", total=None, text="")
        self._part = self._bars.add_task("", total=None, text="", visible=False)
        self._bars.start()

    def status(self, status: dict[str, Any]) -> None:
        done, steps = status["step"], status["steps"]
        eta = f" · eta {units.clock(status['eta_s'])}" if status.get("eta_s") is not None else ""
        self._bars.update(
            self._run, description=status["run"], completed=done, total=steps or None, text=f"step {done}/{steps}{eta}"
        )
        part = status.get("training") if status["phase"] == "training" else status.get("evaluation")
        part = part or {}
        self._bars.update(
            self._part,
            description=status["phase"],
            visible=True,
            completed=part.get("done", 0),
            total=part.get("of") or None,
            text=_short(status),
        )
        with contextlib.suppress(OSError):
            self._bars.refresh()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()


def _short(status: dict[str, Any]) -> str:
    """The few words that a bar has room for."""
    now = status.get("engine") or {}
    held = (status.get("gate") or {}).get("held")
    rate = now.get("tokens_per_s") or 0
    parts = (
        headless.queue(status, units.UNFINISHED[1:]),
        f"{rate:.0f} tok/s" if rate else "",
        f"{held} held" if held else "",
    )
    return " · ".join(part for part in parts if part and part != headless.NOTHING)


def choose(*, as_json: bool, stream: IO[str] | None = None) -> Output:
    """JSON lines where they are asked for, bars on a terminal, plain lines everywhere else."""
    stream = stream or sys.stdout

    def write(line: str) -> None:
        print(line, file=stream, flush=True)

    if as_json:
        return JsonLines(write)
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return Output(write)
    from rich.console import Console

    return Bars(Console(file=stream))
