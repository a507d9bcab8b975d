"""Agents as ordinary processes of this machine, each attempt in a session and a scratch directory of its own.

This keeps rollouts apart and ends what they start; it is no wall against a hostile agent, which can read what the user
can read and reach what the user can reach. Where control groups can be made (cgroups.py), what all processes of a
rollout use together is limited and none of them outlives it; elsewhere memory is limited for each process, and one that
is both in another session and started with an emptied environment is not found. Layout of a scratch directory: `work`
(working directory), `home`, `tmp`, `task.json`, `stdin`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aglite.errors import RecipeError
from aglite.harnesses.find import search_path
from aglite.paths import ROLLOUT_ID, RunDir
from aglite.rollouts import reap_child
from aglite.rollouts.backends import NOT_GIVEN, Launch, base_environment
from aglite.rollouts.backends.cgroups import Cgroup, Cgroups, NoCgroups, find_places
from aglite.rollouts.causes import Cause
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.process import Exit, Limits, Process, end_rollout
from aglite.rollouts.reaper import Reaper

log = logging.getLogger("aglite.rollouts")

PASSED_ON = (
    "LD_LIBRARY_PATH",
    "TZ",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)
"""Variables of the supervisor that a program may need and that are no secrets. No others reach an agent."""

FILE_MB = 2048
"""Largest file that an agent may write."""

WITHOUT_CGROUPS = (
    "control groups cannot be used here ({}): limits.memory_mb holds for each process of an agent, limits.pids and "
    "limits.cpus do not hold, and a process that hides may outlive its rollout"
)


class LocalBackend:
    name = "local"
    base_url = None
    starts_slowly = False

    def __init__(self, run_dir: RunDir, reaper: Reaper, concurrency: int) -> None:
        self._run_dir = run_dir
        self._scratch = run_dir.scratch.resolve()
        self._reaper = reaper
        self._concurrency = concurrency
        self._tasks = _tasks_of_user() + 256 * concurrency
        self._cgroups: Cgroups | None = None

    async def open(self) -> Mapping[str, Any]:
        await self.sweep()
        try:
            cgroups = Cgroups(find_places(), self._reaper.value, self._concurrency)
            await asyncio.to_thread(cgroups.open)
        except NoCgroups as error:
            return {"cgroups": "", "exposed": WITHOUT_CGROUPS.format(error)}
        self._cgroups = cgroups
        self._reaper.watch_cgroups(cgroups.folders)
        return {"cgroups": str(cgroups)}

    async def close(self) -> None:
        if self._cgroups:
            await asyncio.to_thread(self._cgroups.sweep)
            self._cgroups = None

    async def start(self, launch: Launch) -> LocalRunning:
        name = f"{launch.rollout_id}.{launch.attempt}"
        folder = self._scratch / name
        cgroup = None
        try:
            await asyncio.to_thread(_prepare, folder, launch)
            if self._cgroups:
                cgroup = await asyncio.to_thread(self._cgroups.make, name, launch.limits)
            env = {**_base_environment(folder), **launch.env, **self._reaper.environment}
            command = [resolve(launch.command[0], env["PATH"], folder / "work"), *launch.command[1:]]
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            limits = Limits(memory_mb=launch.limits.memory_mb, file_mb=FILE_MB, tasks=self._tasks)
            output = LogFile(launch.log, launch.limits.log_bytes, redactor=launch.redactor)
            try:
                process = Process(
                    command,
                    cwd=folder / "work",
                    env=env,
                    stdin=folder / "stdin",
                    log=output,
                    reaper=self._reaper,
                    limits=limits,
                    join_command=cgroup.join_command if cgroup else "",
                )
            except BaseException:
                output.close()
                raise
        except BaseException:
            if cgroup:
                await asyncio.to_thread(cgroup.end)
            await asyncio.to_thread(remove_tree, folder)
            raise
        return LocalRunning(launch, folder, process, output, cgroup)

    async def sweep(self) -> list[int]:
        own = self._reaper.entry

        def of_a_rollout(environ: bytes) -> bool:
            return reap_child.has(environ, own) and f"\0{ROLLOUT_ID}=".encode() in b"\0" + environ

        def work() -> list[int]:
            ended, surviving = reap_child.end(of_a_rollout)
            if surviving:
                log.warning("processes %s of rollouts do not end on SIGKILL", surviving)
            remove_attempts(self._scratch)
            return ended

        return await asyncio.to_thread(work)


class LocalRunning:
    def __init__(self, launch: Launch, folder: Path, process: Process, output: LogFile, cgroup: Cgroup | None) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.workdir = folder / "work"
        self.flags: list[str] = []
        self._folder = folder
        self._process = process
        self._output = output
        self._cgroup = cgroup
        self._rollout_id = launch.rollout_id
        self._memory_mb = launch.limits.memory_mb
        self._stopped = False
        process.exited.add_done_callback(self._on_exit)

    def _on_exit(self, ended: asyncio.Future[Exit]) -> None:
        exit = ended.result()
        if exit.code and self._cgroup and self._cgroup.out_of_memory:
            exit = replace(exit, cause=Cause("memory", f"limit {self._memory_mb} MB"))
        self.exited.set_result(exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def left_out(self) -> int:
        return self._output.left_out

    @property
    def said(self) -> bytes:
        return self._output.recent

    @property
    def last_line(self) -> str:
        return self._output.last_line()

    async def stop(self, grace_s: float = 0.0) -> list[int]:
        if self._stopped:
            return []
        await self._process.end(grace_s)
        ended = await end_rollout(self._rollout_id, self.pid)
        if self._cgroup:
            ended += await asyncio.to_thread(self._cgroup.end, self.pid)
        self._stopped = True
        return ended

    async def remove(self) -> None:
        await asyncio.to_thread(remove_tree, self._folder)


def resolve(program: str, path: str, workdir: Path) -> str:
    """The executable that the first word of a command means. Raises RecipeError if there is none."""
    if program == "python":
        return sys.executable
    if "/" in program:
        file = workdir / program
        found = str(file) if os.access(file, os.X_OK) and file.is_file() else None
    else:
        found = shutil.which(program, path=path)
    if found is None:
        raise RecipeError(
            f"agent.command: there is no program {program!r}",
            "install it, write its full path, or list it in agent.files (and make it executable) if it is yours",
        )
    _check_interpreter(program, found)
    return found


def _check_interpreter(program: str, file: str) -> None:
    with open(file, "rb") as script:
        first = script.readline(256)
    if first.startswith(b"#!"):
        words = first[2:].split()
        if not words or not os.access(words[0], os.X_OK):
            name = os.fsdecode(words[0]) if words else ""
            raise RecipeError(
                f"agent.command: {program!r} asks for the interpreter {name!r}, which is not here",
                "correct its first line, or name the interpreter in agent.command",
            )


def _base_environment(folder: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    places = (str(folder / name) for name in ("home", "tmp", "task.json"))
    return {**passed, "PATH": search_path(), **base_environment(*places)}


def _prepare(folder: Path, launch: Launch) -> None:
    remove_tree(folder)
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(launch.task))
    (folder / "stdin").write_text(launch.stdin)
    for place, text in launch.home_files.items():
        file = folder / "home" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for source, place in launch.files:
        target = folder / "work" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns(*NOT_GIVEN)
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy2(source, target)


def remove_attempts(scratch: Path) -> None:
    """Delete what attempts left in a run's scratch folder."""
    for folder in scratch.glob("r*.*"):
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Delete a folder, also if the agent took its own permissions away or went deeper than any stack."""
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        try:
            _remove_level_by_level(folder)
        except OSError as error:
            log.warning("could not delete all of %s; it is tried again when the run starts next: %s", folder, error)


def _remove_level_by_level(folder: Path) -> None:
    """Delete as much of a folder as can be, without descending: folders in it are moved up before they are looked into.
    Raises the last OSError of what could not be deleted."""
    prefix = folder / secrets.token_hex(8)
    number, problem = 0, None
    waiting = [str(folder)]
    emptied = []
    while waiting:
        here = waiting.pop()
        emptied.append(here)
        try:
            os.chmod(here, 0o700)
            entries = list(os.scandir(here))
        except OSError as error:
            problem = error
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # to be moved, it must be ours to write to
                    number += 1
                    os.rename(entry.path, f"{prefix}.{number}")
                    waiting.append(f"{prefix}.{number}")
                else:
                    os.unlink(entry.path)
            except OSError as error:
                problem = error
    for here in reversed(emptied):
        try:
            os.rmdir(here)
        except OSError as error:
            problem = problem or error
    if problem:
        raise problem


def _tasks_of_user() -> int:
    """Processes and threads that the user has now; what RLIMIT_NPROC counts."""
    own, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == own:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue  # it ended meanwhile
    return count
