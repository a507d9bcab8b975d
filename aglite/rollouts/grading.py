"""Grading: the recipe's function, in a fresh process, after the agent has ended."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.rollouts import grade_child
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.process import Exit, Limits, Process, end_rollout
from aglite.rollouts.reaper import Reaper

if TYPE_CHECKING:
    from aglite.store import Store

TRIES = 2
"""A grader that fails is tried once more: it may have met a moment without memory or network."""

LOG_BYTES = 256 * 1024
LONGEST_RESULT = 1 << 20
LOAD_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Grade:
    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)


class GraderError(Exception):
    """The grader gave no reward; the text says why. `raised`: it raised an exception of its own accord."""

    def __init__(self, text: str, *, raised: bool = False) -> None:
        super().__init__(text)
        self.raised = raised


class Grader:
    """Runs `reward.grade` of a recipe."""

    def __init__(self, recipe: Recipe, reaper: Reaper) -> None:
        assert recipe.reward is not None
        self._reward = recipe.reward
        self._folder = recipe.folder
        self._reaper = reaper
        self._file, _, self._function = recipe.reward.grade.partition(":")

    @property
    def skips_failures(self) -> bool:
        """An agent's failure is worth 0 without looking."""
        return self._reward.on_failure == "zero"

    async def check(self, log: Path) -> None:
        """Load the grader once, in a process as for a grading. Raises RecipeError if that does not work."""
        if not self._file.endswith(".py") or not self._function.isidentifier():
            raise RecipeError(f"reward.grade: {self._reward.grade!r} names no function", "write it as grade.py:grade")
        try:
            await self._once({}, LOAD_TIMEOUT_S, log, "", None)
        except GraderError as error:
            raise RecipeError(
                f"reward.grade: {self._reward.grade} cannot be used: {error}",
                f"correct {self._folder / self._file}; the traceback is in {log}",
            ) from None
        finally:
            if log.exists() and log.stat().st_size == 0:
                log.unlink()

    async def grade(
        self,
        task: Mapping[str, Any],
        rollout: Mapping[str, Any],
        workdir: Path,
        *,
        log: Path,
        stop: asyncio.Future[Any],
    ) -> Grade | None:
        """The grade of one rollout; None if `stop` was done first. Raises GraderError after its last try.

        `task` is the whole row, `rollout` a JSON object with `id` and whatever else the grader may know. What the
        grader prints is added to `log`.
        """
        request = {"task": task, "rollout": rollout, "workdir": str(workdir)}
        for tries_left in reversed(range(TRIES)):
            try:
                value = await self._once(request, self._reward.timeout_s, log, rollout["id"], stop)
                return None if stop.done() else check_grade(value)
            except GraderError:
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    async def _once(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        log: Path,
        rollout_id: str,
        stop: asyncio.Future[Any] | None,
    ) -> Any:
        place = {"folder": str(self._folder), "file": self._file, "function": self._function}
        fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("request", "result")]
        try:
            _write(fds[0], json.dumps({**request, **place}).encode())
            output = LogFile(log, LOG_BYTES, header=b"--- grader ---\n", append=True)
            try:
                process = Process(
                    [sys.executable, "-P", grade_child.__file__, *map(str, fds)],
                    cwd=self._folder,
                    env={**os.environ, **self._reaper.environment, "AGLITE_ROLLOUT_ID": rollout_id},
                    log=output,
                    reaper=self._reaper,
                    limits=Limits(open_files=None),
                    pass_fds=fds,
                )
            except OSError as error:
                output.close()
                raise GraderError(f"its process could not be started: {error}") from None
            try:
                await asyncio.wait(
                    {process.exited, *([stop] if stop else [])},
                    timeout=timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                late = not process.exited.done()
            finally:
                exit = await process.end()
                if rollout_id:
                    await end_rollout(rollout_id, process.pid)
            if stop is not None and stop.done():
                return None
            if late:
                raise GraderError(f"no result within {timeout_s:g} s")
            return _result(os.pread(fds[1], LONGEST_RESULT + 1, 0), exit, output.last_line())
        finally:
            for fd in fds:
                os.close(fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)


def _result(data: bytes, exit: Exit, last_line: str) -> Any:
    if len(data) > LONGEST_RESULT:
        raise GraderError(f"its result is larger than {LONGEST_RESULT:,} bytes")
    try:
        result = json.loads(data)
    except ValueError:
        how = f"exit code {exit.code}" if exit.code >= 0 else f"signal {-exit.code}"
        raise GraderError(f"ended without a result ({how}){': ' + last_line if last_line else ''}") from None
    if "unloadable" in result:
        raise GraderError(result["unloadable"])
    if "raised" in result:
        raise GraderError(result["raised"], raised=True)
    return result["value"]


def conversations(store: Store, rollout_id: str, attempt: int) -> dict[str, Any]:
    """What a grader is told of an attempt's calls: `calls`, their number; `conversations`, lists of messages, one for
    each call that no later call continues; `messages`, the last of these."""
    calls = store.calls(rollout_id, attempt)
    messages = store.conversations(rollout_id, attempt)
    continued = {call.matched_id for call in calls}
    found = []
    for call in calls:
        if call.id not in continued:
            prompt, reply = messages[call.id]
            found.append([*prompt, *([reply] if reply else [])])
    return {"calls": len(calls), "conversations": found, "messages": found[-1] if found else []}


def check_grade(value: Any) -> Grade:
    """The grade that a grader's return value (as JSON) means. Raises GraderError for what is none."""
    if not isinstance(value, dict):
        return Grade(_number(value, "returned"))
    unknown = sorted(set(value) - {"reward", "breakdown"})
    if "reward" not in value or unknown:
        raise GraderError(f"returned the keys {sorted(value)}, not reward (and breakdown)")
    breakdown = value.get("breakdown") or {}
    if not isinstance(breakdown, dict):
        raise GraderError(f"returned {breakdown!r:.100} as breakdown, not a mapping of names to numbers")
    return Grade(
        _number(value["reward"], "returned as reward"),
        {name: _number(part, f"returned as breakdown.{name}") for name, part in breakdown.items()},
    )


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise GraderError(f"{what} {value!r:.100}, not a finite number")
    return float(value)
