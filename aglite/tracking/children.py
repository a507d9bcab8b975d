"""The supervisor's side: starts a process for each writer, says so once when one fails, waits for them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from aglite.paths import RunDir
from aglite.rollouts.reaper import Reaper
from aglite.store import Store
from aglite.tracking.points import Tracker

FINISH_S = 30.0
"""How long a writer may take to finish when the run has ended."""


class Trackers:
    """The writers of a run. Nothing that they do or fail to do is waited for while the run goes on."""

    def __init__(
        self, trackers: Iterable[Tracker], run_dir: RunDir, store: Store, reaper: Reaper, env: Mapping[str, str]
    ) -> None:
        self._trackers = list(trackers)
        self._run_dir = run_dir
        self._store = store
        self._reaper = reaper
        self._env = {**env, **reaper.environment}
        self._children: dict[Tracker, asyncio.subprocess.Process] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._given_up: set[Tracker] = set()

    async def start(self) -> None:
        for tracker in self._trackers:
            with self._log(tracker).open("wb") as log:
                child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "aglite.tracking",
                    tracker,
                    str(self._run_dir.path),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    start_new_session=True,
                )
            self._reaper.add(child.pid)
            self._children[tracker] = child
            self._watching.append(asyncio.create_task(self._watch(tracker, child)))

    async def stop(self) -> None:
        """Let them write what is left, and end those that take too long."""
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        if self._watching:
            await asyncio.wait(self._watching, timeout=FINISH_S)
        for tracker, child in self._children.items():
            if child.returncode is None:
                self._given_up.add(tracker)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await self._say(tracker, f"was not done {FINISH_S:g} s after the end, and was ended")
        await asyncio.gather(*self._watching)

    async def _watch(self, tracker: Tracker, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        self._reaper.remove(child.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # processes of its own that it left
        if code and tracker not in self._given_up:
            how = f"failed: {self._last_words(tracker)}" if code > 0 else f"was killed by signal {-code}"
            await self._say(tracker, how)

    async def _say(self, tracker: Tracker, what: str) -> None:
        mend = f"the run goes on without it; afterwards: aglite export --to {tracker} --dir {self._run_dir.path}"
        text = f"tracking: {tracker} {what}\n-> {mend} (see {self._log(tracker)})"
        await self._store.add_event("error", "tracking", text, {"tracker": tracker})

    def _log(self, tracker: Tracker) -> Path:
        return self._run_dir.logs / f"tracking-{tracker}.log"

    def _last_words(self, tracker: Tracker) -> str:
        lines = [line.strip() for line in self._log(tracker).read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith("->")]
        return said[-1][:500] if said else "it said nothing"
