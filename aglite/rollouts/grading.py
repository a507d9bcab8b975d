"""Grading: the recipe's grader, in a fresh process and a fresh copy of what the agent left, after it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.paths import ROLLOUT_ID
from aglite.rollouts import grade_child
from aglite.rollouts.backends.local import remove_tree
from aglite.rollouts.collect import Collected, Rules, collect, originals_of
from aglite.rollouts.environment import agent_files
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.plans import Ungradable, careful_git, clean_environment, plan_of
from aglite.rollouts.process import Exit, Limits, Process, end_rollout
from aglite.rollouts.reaper import Reaper
from aglite.rollouts.sandboxed import NotRun, Start
from aglite.rollouts.sandboxed_command import run_command
from aglite.rollouts.sandboxed_tests import run_tests

TRIES = 2
"""A grader that fails is tried once more: it may have met a moment without memory or network."""

LOG_BYTES = 256 * 1024
LONGEST_RESULT = 1 << 20
LOAD_TIMEOUT_S = 60.0


MARGIN_S = 30.0
"""What a process that watches its own time limit gets on top of it: on a busy machine, it may take a while to start and
to end what it watches."""


@dataclass(slots=True)
class Grade:
    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


class GraderError(Exception):
    """The grader gave no reward; the text says why. `raised`: it raised an exception of its own accord."""

    def __init__(self, text: str, *, raised: bool = False) -> None:
        super().__init__(text)
        self.raised = raised


class Grader:
    """Runs what `reward` of a recipe says, in fresh copies of what an agent left."""

    def __init__(self, recipe: Recipe, reaper: Reaper, start: Start | None = None) -> None:
        """`start` makes containers, for graders that run in one; to `check` it is not needed."""
        assert recipe.reward is not None
        self._start = start
        self._reward = recipe.reward
        self._folder = recipe.folder
        self._reaper = reaper
        self._keeps_text = recipe.retention.traffic == "all"
        self._redactor = recipe.stored_redactor
        self._plan = plan_of(recipe)
        self._recipe = recipe

    @functools.cached_property
    def _originals(self) -> dict[str, Path]:
        return originals_of(agent_files(self._recipe))

    @property
    def skips_failures(self) -> bool:
        """An agent's failure is worth 0 without looking."""
        return self._reward.on_failure == "zero"

    async def check(self, log: Path) -> None:
        """See that all it needs is there, and load a function once, in a process as for a grading. Raises RecipeError
        if that does not work."""
        await asyncio.to_thread(self._plan.check)
        if not self._plan.loads:
            return
        request = self._plan.request({}, Path(), Path(), {})
        try:
            await self._once(request, {**os.environ, **self._own_environment("")}, LOAD_TIMEOUT_S, log, "", None)
        except GraderError as error:
            raise RecipeError(
                f"reward.grade: {self._reward.grade} cannot be used: {error}",
                f"correct {self._folder / request['file']}; the traceback is in {log}",
            ) from None
        finally:
            if log.exists() and log.stat().st_size == 0:
                log.unlink()

    def _own_environment(self, rollout_id: str) -> dict[str, str]:
        """By which a grader's processes are found, to be ended."""
        return {**self._reaper.environment, ROLLOUT_ID: rollout_id}

    def collect(self, task: Mapping[str, Any], workdir: Path, target: Path) -> Collected:
        """A copy of what the grader may see of what an agent left in `workdir`. Raises GraderError for a task that it
        cannot grade. Blocks."""
        try:
            owned = self._plan.owned(task)
        except Ungradable as error:
            raise GraderError(str(error)) from None
        return collect(
            workdir,
            target,
            Rules(
                paths=self._reward.paths,
                owned=owned,
                steering=self._plan.steering,
                max_files=self._reward.max_files,
                max_bytes=self._reward.max_mb << 20,
                originals=self._originals,
            ),
        )

    async def grade(
        self,
        task: Mapping[str, Any],
        rollout: Mapping[str, Any],
        left: Path,
        *,
        log: Path,
        stop: asyncio.Future[Any],
        env: Mapping[str, str] | None = None,
    ) -> Grade | None:
        """The grade of one rollout; None if `stop` was done first. Raises GraderError after its last try.

        `task` is the whole row, `rollout` a JSON object with `id` and whatever else the grader may know, `left` what
        `collect` made; it is not changed, but folders are made beside it. What the grader prints is added to `log`,
        `env` to its environment.
        """
        grades = []
        for number in range(self._reward.repeat):
            for tries_left in reversed(range(TRIES)):
                place = left.with_name(f"{left.name}.{number}.{tries_left}")
                try:
                    value = await self._in_copy(task, rollout, left, place, log, stop, env or {})
                    if stop.done():
                        return None
                    grades.append(check_grade(value["value"], value.get("flags", ())))
                    break
                except GraderError:
                    if not tries_left:
                        raise
        return combined(grades, self._reward.repeat_rule)

    async def _in_copy(
        self,
        task: Mapping[str, Any],
        rollout: Mapping[str, Any],
        left: Path,
        place: Path,
        log: Path,
        stop: asyncio.Future[Any],
        env: Mapping[str, str],
    ) -> Any:
        plan, work, tmp = self._plan, place / "work", place / "tmp"
        own = {**env, **self._own_environment(rollout["id"])}
        environment = {**(clean_environment(tmp) if plan.own_environment else os.environ), **own}
        environment |= careful_git(environment)
        if self._reward.judge:
            environment.pop(self._reward.judge.key_env, None)

        def prepare() -> dict[str, Any]:
            shutil.copytree(left, work, symlinks=True)
            tmp.mkdir()
            return plan.request(task, work, tmp, environment)

        try:
            try:
                request = await asyncio.to_thread(prepare)
            except Ungradable as error:
                raise GraderError(str(error)) from None
            except OSError as error:
                raise GraderError(f"its copy of what the agent left could not be made: {error}") from None
            request |= {"task": task, "rollout": rollout}
            if plan.in_container:
                return await self._in_container(request, place, log, stop)
            timeout_s = self._reward.timeout_s + (MARGIN_S if plan.own_environment else 0)
            return await self._once(request, environment, timeout_s, log, rollout["id"], stop)
        finally:
            await asyncio.to_thread(remove_tree, place)

    async def _in_container(
        self, request: Mapping[str, Any], place: Path, log: Path, stop: asyncio.Future[Any]
    ) -> dict[str, Any] | None:
        assert self._start is not None
        name, work, tmp = place.name, place / "work", place / "tmp"
        limits = self._recipe.agent.limits.model_copy(update={"log_bytes": LOG_BYTES if self._keeps_text else 0})
        said = tmp / "log"
        settings = {
            "limits": limits,
            "timeout_s": self._reward.timeout_s,
            "log": said,
            "redactor": self._redactor,
            "stop": stop,
        }
        try:
            if request["kind"] == "pytest":
                python = request["argv"][0]
                return await run_tests(self._start, request["plan"], name, work, tmp, python=python, **settings)
            result = await run_command(self._start, request, name, work, **settings)
            return result and _without_failure(result)
        except NotRun as error:
            raise GraderError(str(error)) from None
        finally:
            await asyncio.to_thread(_append, said, log)

    async def _once(
        self,
        request: Mapping[str, Any],
        environment: Mapping[str, str],
        timeout_s: float,
        log: Path,
        rollout_id: str,
        stop: asyncio.Future[Any] | None,
    ) -> Any:
        fds = [os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for name in ("request", "result")]
        try:
            _write(fds[0], json.dumps(request).encode())
            cap = LOG_BYTES if self._keeps_text or not rollout_id else 0
            output = LogFile(log, cap, header=b"--- grader ---\n", append=True, redactor=self._redactor)
            try:
                process = Process(
                    [sys.executable, "-P", grade_child.__file__, *map(str, fds)],
                    cwd=self._folder,
                    env=environment,
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
            sealed = fcntl.fcntl(fds[1], fcntl.F_GET_SEALS) == grade_child.SEALS
            data = os.pread(fds[1], LONGEST_RESULT + 1, 0) if sealed and exit.code == 0 else b""
            return _result(data, exit, output.last_line())
        finally:
            for fd in fds:
                os.close(fd)


def _append(said: Path, log: Path) -> None:
    with contextlib.suppress(OSError), log.open("ab") as file:  # a full disk costs output, not the rollout
        file.write(b"--- grader ---\n" + said.read_bytes())


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
    except (ValueError, RecursionError):
        how = f"exit code {exit.code}" if exit.code >= 0 else f"signal {-exit.code}"
        raise GraderError(f"ended without a result ({how}){': ' + last_line if last_line else ''}") from None
    return _without_failure(result)


def _without_failure(result: Any) -> Any:
    """A result of grade_child.py's, if it is none of a failure. Raises GraderError."""
    if "unloadable" in result:
        raise GraderError(result["unloadable"])
    if "raised" in result:
        raise GraderError(result["raised"], raised=True)
    return result


def combined(grades: Sequence[Grade], rule: str) -> Grade:
    """What repeated gradings come to, by `reward.repeat_rule`; `flaky` when they differ."""
    pick = {
        "all": min,
        "any": max,
        "majority": lambda values: sorted(values)[(len(values) - 1) // 2],
        "mean": statistics.fmean,
    }[rule]
    if len(grades) == 1:
        return grades[0]
    names = dict.fromkeys(name for grade in grades for name in grade.breakdown)
    flags = {flag for grade in grades for flag in grade.flags}
    if len({grade.reward for grade in grades}) > 1:
        flags.add("flaky")
    return Grade(
        pick([grade.reward for grade in grades]),
        {name: pick([grade.breakdown.get(name, 0.0) for grade in grades]) for name in names},
        sorted(flags),
    )


def check_grade(value: Any, flags: Sequence[str] = ()) -> Grade:
    """The grade that a grader's return value (as JSON) means. Raises GraderError for what is none."""
    if not isinstance(value, dict):
        return Grade(_number(value, "returned"), flags=list(flags))
    unknown = sorted(set(value) - {"reward", "breakdown"})
    if "reward" not in value or unknown:
        raise GraderError(f"returned the keys {sorted(value)}, not reward (and breakdown)")
    breakdown = value.get("breakdown") or {}
    if not isinstance(breakdown, dict):
        raise GraderError(f"returned {_shown(breakdown)} as breakdown, not a mapping of names to numbers")
    return Grade(
        _number(value["reward"], "returned as reward"),
        {name: _number(part, f"returned as breakdown.{name}") for name, part in breakdown.items()},
        list(flags),
    )


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond the largest float
        pass
    raise GraderError(f"{what} {_shown(value)}, not a finite number")


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except RecursionError:
        return "something nested very deeply"
