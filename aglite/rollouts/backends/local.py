"""Agents as ordinary processes of this machine, each attempt in a session and a scratch directory of its own.

This keeps rollouts apart and ends what they start; it is no wall against a hostile agent, which can read what the user
can read, and leave a process behind that is both in another session and started with an emptied environment. Layout of
a scratch directory: `work` (working directory), `home`, `tmp`, `task.json`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from aglite.errors import RecipeError
from aglite.paths import RunDir
from aglite.rollouts import reap_child
from aglite.rollouts.backends import Launch
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


class LocalBackend:
    name = "local"

    def __init__(self, run_dir: RunDir, reaper: Reaper, concurrency: int) -> None:
        self._run_dir = run_dir
        self._scratch = run_dir.scratch.resolve()
        self._reaper = reaper
        self._tasks = _tasks_of_user() + 256 * concurrency

    async def start(self, launch: Launch) -> LocalRunning:
        folder = self._scratch / f"{launch.rollout_id}.{launch.attempt}"
        try:
            await asyncio.to_thread(_prepare, folder, launch)
            env = {**_base_environment(folder), **launch.env, **self._reaper.environment}
            command = [resolve(launch.command[0], env["PATH"], folder / "work"), *launch.command[1:]]
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            limits = Limits(memory_mb=launch.limits.memory_mb, file_mb=FILE_MB, tasks=self._tasks)
            output = LogFile(launch.log, launch.limits.log_bytes)
            try:
                process = Process(command, cwd=folder / "work", env=env, log=output, reaper=self._reaper, limits=limits)
            except BaseException:
                output.close()
                raise
        except BaseException:
            await asyncio.to_thread(remove_tree, folder)
            raise
        return LocalRunning(launch.rollout_id, folder, process, output)

    async def sweep(self) -> list[int]:
        own = self._reaper.entry

        def of_a_rollout(environ: bytes) -> bool:
            return reap_child.has(environ, own) and b"\0AGLITE_ROLLOUT_ID=" in b"\0" + environ

        def work() -> list[int]:
            ended, surviving = reap_child.end(of_a_rollout)
            if surviving:
                log.warning("processes %s of rollouts do not end on SIGKILL", surviving)
            for folder in self._scratch.glob("r*.*"):
                remove_tree(folder)
            return ended

        return await asyncio.to_thread(work)


class LocalRunning:
    def __init__(self, rollout_id: str, folder: Path, process: Process, output: LogFile) -> None:
        self.exited: asyncio.Future[Exit] = process.exited
        self.workdir = folder / "work"
        self._folder = folder
        self._process = process
        self._output = output
        self._rollout_id = rollout_id
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def left_out(self) -> int:
        return self._output.left_out

    @property
    def last_line(self) -> str:
        return self._output.last_line()

    async def stop(self, grace_s: float = 0.0) -> list[int]:
        if self._stopped:
            return []
        await self._process.end(grace_s)
        ended = await end_rollout(self._rollout_id, self.pid)
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
    path = os.environ.get("PATH", os.defpath)
    return {
        **passed,
        "PATH": f"{os.path.dirname(sys.executable)}:{path}",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "AGLITE_TASK_FILE": str(folder / "task.json"),
        "LANG": "C.UTF-8",
        "SHELL": "/bin/sh",
        "USER": "agent",
        "LOGNAME": "agent",
        # what an agent printed before it was ended is in its log
        "PYTHONUNBUFFERED": "1",
    }


def _prepare(folder: Path, launch: Launch) -> None:
    remove_tree(folder)
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(launch.task))
    for source, place in launch.files:
        target = folder / "work" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".git")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy2(source, target)


def remove_tree(folder: Path) -> None:
    """Delete a folder, also if the agent took its own permissions away."""
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError:
        for path, _, _ in os.walk(folder):  # top down: each folder is opened before it is listed
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            log.warning("could not delete %s; it is tried again when the run starts next", folder)


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
