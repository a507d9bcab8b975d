"""The supervisor's side of the reaper process (reap_child.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from aglite.rollouts import reap_child

log = logging.getLogger("aglite.rollouts")

MARK = "AGLITE_SUPERVISOR"
"""Environment variable of every child of a supervisor; its value `<random>@<run directory>` names the supervisor."""


class Reaper:
    """Ends every child of the supervisor when the supervisor dies, also by SIGKILL.

    Children are given `environment` (so that they are found whatever they do) and are added by process group (so that
    they are ended at once). The process has a session of its own: Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir.resolve()
        self._log = self._dir / "logs" / "reaper.log"
        self._value = f"{secrets.token_hex(6)}@{self._dir}"
        self._groups: set[int] = set()
        self._docker = ""
        self._cgroups: list[str] = []
        self._in_memory: list[Path] = []
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def value(self) -> str:
        """What names the supervisor: the value of MARK, and of the label of its containers."""
        return self._value

    @property
    def environment(self) -> dict[str, str]:
        """What to add to a child's environment."""
        return {MARK: self._value}

    @property
    def entry(self) -> bytes:
        """`environment` as it stands in /proc/PID/environ."""
        return os.fsencode(f"{MARK}={self._value}")

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """End what an earlier supervisor of this run directory left, and start the process; again does nothing.

        Hold the run directory's lock.
        """
        if self._child is None:
            ended = await asyncio.to_thread(self.sweep)
            if ended:
                log.warning("ended %d processes that an earlier run in %s had left", len(ended), self._dir)
            self._spawn()

    def add(self, pgid: int) -> None:
        """End this process group when the supervisor dies."""
        self._groups.add(pgid)
        self._tell_or_restart(f"+{pgid}\n")

    def watch_docker(self, socket_path: str) -> None:
        """Delete the supervisor's containers too when it dies, at the engine that has this socket."""
        self._docker = socket_path
        self._tell_or_restart(f"@{socket_path}\n")

    def watch_cgroups(self, folders: Sequence[str]) -> None:
        """End and delete these control groups when the supervisor dies."""
        self._cgroups = list(folders)
        for folder in self._cgroups:
            self._tell_or_restart(f"&{folder}\n")

    def watch_memory(self, path: Path) -> None:
        """Delete this file or folder, which lies in memory, when the supervisor dies."""
        self._in_memory.append(path)
        self._tell_or_restart(f"={path}\n")

    def remove(self, pgid: int) -> None:
        """The group has ended. Call it before its number can pass to another process."""
        self._groups.discard(pgid)
        self._tell_or_restart(f"-{pgid}\n")

    async def stop(self) -> None:
        """End the reaper; what it was told of is left alone, so end that first."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(b".\n")
        child.stdin.close()
        child.wait()

    def sweep(self) -> list[int]:
        """End what an earlier supervisor of this run directory left: its reaper was killed too.

        Returns the ids of the processes that were ended.
        """
        own, start, ending = self.entry, f"\0{MARK}=".encode(), os.fsencode(f"@{self._dir}\0")

        def left_over(environ: bytes) -> bool:
            block = b"\0" + environ
            at = block.find(start)
            value = block[at + 1 : block.find(b"\0", at + 1) + 1]
            return at >= 0 and value.endswith(ending) and value[:-1] != own

        return reap_child.end(left_over)[0]

    def _spawn(self) -> None:
        mark = f"{MARK}={self._value}"
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", reap_child.__file__, mark, str(self._log), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
            bufsize=0,
        )
        if self._docker:
            self._tell(f"@{self._docker}\n")
        for folder in self._cgroups:
            self._tell(f"&{folder}\n")
        for path in self._in_memory:
            self._tell(f"={path}\n")
        for pgid in self._groups:
            self._tell(f"+{pgid}\n")

    def _tell(self, line: str) -> None:
        assert self._child and self._child.stdin
        self._child.stdin.write(line.encode())

    def _tell_or_restart(self, line: str) -> None:
        if self._child is None:
            return
        try:
            self._tell(line)
        except BrokenPipeError:  # somebody killed it: a new one is told all groups
            self._child.wait()
            self._spawn()
