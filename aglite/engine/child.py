"""A process of ours that holds a model: started with a log, noticed when it ends, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from aglite.errors import EngineError
from aglite.units import signal_name

LOG_LINES = 20
"""Lines of the child's log that an error carries."""
NOISE = re.compile(r"^ - (leaked|\.\.\. skipped)|^nanobind: |^See https://nanobind|resource_tracker|^$|\] Route: /")
"""What libraries say at the end of a process, after what matters, and vLLM of each of its many routes."""

KILL_S = 60.0
"""How long a process may take to end on SIGKILL; one that holds much memory of a GPU takes a while."""
HEARTBEAT_TIMEOUT_S = 30.0
"""Silence after which a child counts as hung and is ended."""


@dataclasses.dataclass(slots=True, frozen=True)
class ChildExit:
    """How the process ended. `code` is negative for a signal; `stopped` means that we asked for it; `why` is what its
    log tells of the cause, where that could be read."""

    code: int
    reason: str
    log: tuple[str, ...]
    stopped: bool
    why: EngineError | None = None

    def error(self) -> EngineError:
        if self.why is not None:
            return self.why
        return EngineError(
            f"{self.reason}{quoted(self.log)}",
            "see its log, and start the same command again; `aglite up` goes on from the last checkpoint",
        )


def quoted(lines: Sequence[str]) -> str:
    """Lines of a log as errors show them, each on a line of its own."""
    return "".join(f"\n  | {line}" for line in lines)


class Child:
    """One process in a process group of its own, its output appended to a log. It runs once.

    `name` is what errors call it. Set `stopping` before it is ended by our wish. `explain` is given the exit code and
    the end of the log of one that ended by itself.
    """

    def __init__(
        self,
        name: str,
        log_path: Path,
        explain: Callable[[int, tuple[str, ...]], EngineError | None] = lambda code, lines: None,
    ) -> None:
        self.name = name
        self.stopping = False
        self.exited: asyncio.Future[ChildExit]
        """Set as soon as the process has ended."""
        self.pid: int | None = None
        self._explain = explain
        self._log_path = log_path
        self._log_start = 0
        self._killed_because = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.exited = asyncio.get_running_loop().create_future()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.pid = process.pid
        self._watch = asyncio.create_task(self._watch_exit(process))

    @property
    def ended(self) -> bool:
        return self.exited.done()

    async def wait(self, timeout_s: float) -> None:
        """Give it so long to end by itself; SIGKILL the whole group then, and what is left of it in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.exited)
        await self.kill(f"the {self.name} did not stop within {timeout_s:g} s")

    def terminate(self) -> None:
        """Ask it to end, if it runs."""
        if self.pid is not None and not self.ended:  # else the number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    async def kill(self, reason: str) -> None:
        """SIGKILL what is left of the process group; `exited` is set when this returns, at the latest after KILL_S.
        Nothing to do for one that could not be started."""
        if self.pid is None:  # 0 would be our own group
            return
        if not self.exited.done():
            self._killed_because = reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.wait({self.exited}, timeout=KILL_S)
        if not self.exited.done():  # nobody can end it, and nobody shall wait for it for ever
            held = f"process {self.pid} does not end on SIGKILL: the kernel holds it, as for a driver that hangs"
            self._end(-signal.SIGKILL, f"{reason}, and {held}", None)

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        by = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        reason, why = self._killed_because or f"the {self.name} {by}", None
        try:
            if not self._killed_because:
                why = self._explain(code, self.last_lines(1000))
        finally:  # whatever was made of its log: nobody must wait for its end for ever
            self._end(code, reason, why)

    def _end(self, code: int, reason: str, why: EngineError | None) -> None:
        if not self.exited.done():
            self.exited.set_result(ChildExit(code, reason, self.last_lines(), self.stopping, why))

    def last_lines(self, count: int = LOG_LINES) -> tuple[str, ...]:
        """The end of what it has printed."""
        try:
            with self._log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 65536))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return (f"(its log cannot be read: {error})",)
        return tuple(line for line in text.splitlines() if line.strip() and not NOISE.search(line))[-count:]
