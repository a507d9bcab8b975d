"""One child process in a session of its own: limits, captured output, one exit, no leftovers in its group.

Nothing is polled: the exit arrives through a pidfd and the output through a pipe, both watched by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aglite.errors import AgliteError
from aglite.paths import ROLLOUT_ID
from aglite.rollouts import reap_child
from aglite.rollouts.causes import Cause
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.reaper import Reaper

# Limits are set by a shell between fork and exec, where Python code in a process with threads could deadlock. It also
# enters the control group, and makes the kernel choose an agent, not the supervisor or the model worker, when memory
# runs out. Redirections that a container forbids are no reason not to run.
SHIM = '{join}{{ echo 500 >/proc/self/oom_score_adj; }} 2>/dev/null; {limits} exec "$@"'

READ_BYTES = 1 << 16
FLOOD_PAUSE_S = 0.002
"""Pause between reads from a process whose log is full: it is slowed to some 30 MB/s so that others are not."""

UNKILLABLE_S = 20.0

CLEARLY_MORE = 1.25
"""Times our own peak that a child's must be to be its own. The kernel counts pages for each CPU and adds them up
roughly, so one and the same peak reads a little differently from one time to the next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of each process of an attempt. None: as the supervisor has it."""

    memory_mb: int | None = None
    """Private writable memory (RLIMIT_DATA). Not address space: Node and Go reserve far more than they use."""
    file_mb: int | None = None
    open_files: int | None = 4096
    tasks: int | None = None
    """Processes and threads *of the user*, its other programs included; the kernel exempts root."""

    def shell(self) -> str:
        wanted = (
            ("d", resource.RLIMIT_DATA, self.memory_mb and self.memory_mb << 20, 1024),
            ("f", resource.RLIMIT_FSIZE, self.file_mb and self.file_mb << 20, 512),
            ("n", resource.RLIMIT_NOFILE, self.open_files, 1),
            ("p", resource.RLIMIT_NPROC, self.tasks, 1),
        )
        commands = ["ulimit -c 0;"]
        for flag, which, value, unit in wanted:
            if value:
                hard = resource.getrlimit(which)[1]
                if hard != resource.RLIM_INFINITY:
                    value = min(value, hard)
                commands.append(f"ulimit -{flag} {value // unit} || exit 125;")
        # bash spells -p as -u
        return re.sub(r"ulimit -p (\d+)", r"{ ulimit -p \1 || ulimit -u \1; } 2>/dev/null", " ".join(commands))


@dataclass(frozen=True, slots=True)
class Exit:
    code: int
    """Exit code; -N if signal N ended it."""
    peak_rss_mb: float
    """0: not known, as it was not clearly more than the supervisor's own."""
    cause: Cause | None = None
    """What a backend knows of the end better than the code says: out of memory, lost."""


class Process:
    """Started by its constructor, in the running event loop. Raises OSError if the machine cannot start it; `log` is
    closed at its end only."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        log: LogFile,
        reaper: Reaper,
        limits: Limits,
        stdin: Path = Path(os.devnull),
        pass_fds: Sequence[int] = (),
        join_command: str = "",
    ) -> None:
        """`join_command`: what a shell does to be in the control group that the process is to be in."""
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._reaper = reaper
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._pause: asyncio.TimerHandle | None = None
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        """Done when the process has ended, its group has been killed and its output is in the log."""
        self._out, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self._out, False)
            with stdin.open("rb") as reading:
                self._popen = subprocess.Popen(
                    ["/bin/sh", "-c", SHIM.format(join=join_command, limits=limits.shell()), "sh", *command],
                    stdin=reading,
                    stdout=writing,
                    stderr=writing,
                    cwd=cwd,
                    env=dict(env),
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
        except BaseException:
            os.close(self._out)
            raise
        finally:
            os.close(writing)
        self.pid = self._popen.pid
        # Until it was replaced by the shell, which it is by now, the child had our memory, and the kernel keeps that as
        # its peak.
        self._own_peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            reaper.add(self.pid)
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:  # too many open files
            os.close(self._out)
            self.kill()
            reaper.remove(self.pid)
            self._popen.wait()
            raise
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(self._out, self._on_output)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the whole process group. After the exit, nothing: its number may be another's by then."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def end(self, grace_s: float = 0.0) -> Exit:
        """End the process group: SIGTERM, `grace_s` later SIGKILL. Waits for the exit."""
        if not self.exited.done() and grace_s > 0:
            self.kill(signal.SIGTERM)
            await asyncio.wait({self.exited}, timeout=grace_s)
        self.kill()
        await asyncio.wait({self.exited}, timeout=UNKILLABLE_S)
        if not self.exited.done():
            raise AgliteError(
                f"process {self.pid} does not end on SIGKILL",
                "it hangs in the kernel, often on a file system: see dmesg",
            )
        return self.exited.result()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The leader is dead but not reaped: its number, which is the group's, cannot be anyone else's yet.
        self.kill()
        _, status, usage = os.wait4(self.pid, 0)
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        self._reaper.remove(self.pid)
        if self._pause:
            self._pause.cancel()
        self._loop.remove_reader(self._out)
        # What the pipe still holds, at most: a process that left the group may go on writing to it.
        for _ in range(1 + (1 << 20) // READ_BYTES):
            if not self._read():
                break
        os.close(self._out)
        self._log.close()
        if not self.exited.done():
            peak_kb = usage.ru_maxrss if usage.ru_maxrss > CLEARLY_MORE * self._own_peak_kb else 0
            self.exited.set_result(Exit(self._popen.returncode, peak_kb / 1024))

    def _on_output(self) -> None:
        count = self._read()
        if count == 0:
            self._loop.remove_reader(self._out)
        elif self._log.full:
            self._loop.remove_reader(self._out)
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._out, self._on_output)

    def _read(self) -> int | None:
        """One read into the log. Bytes read; 0 at the end of the output, None if there is none at the moment."""
        try:
            count = os.readv(self._out, [self._buffer])
        except BlockingIOError:
            return None
        self._log.write(self._buffer[:count])
        return count


async def end_rollout(rollout_id: str, dying_session: int) -> list[int]:
    """End what a rollout's processes left outside their process group: whatever has its id in the environment.

    Returns the ids of what was ended, `dying_session` (whose group was killed already) aside. Raises AgliteError if
    something does not end.
    """
    entry = os.fsencode(f"{ROLLOUT_ID}={rollout_id}")
    ended, surviving = await asyncio.to_thread(
        reap_child.end, lambda environ: reap_child.has(environ, entry), 15.0, dying_session
    )
    if surviving:
        raise AgliteError(f"processes {surviving} of a rollout do not end on SIGKILL", "look at them with ps and dmesg")
    return ended
