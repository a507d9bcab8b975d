"""Where agents run. One class a place, behind one interface; `agent.backend` in the recipe chooses.

A backend starts one attempt, sees it end, ends it and whatever it started, and hands out what it left. It knows nothing
of models, rewards or states: those are the launcher's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aglite.config import Limits
from aglite.redact import Redactor
from aglite.rollouts.process import Exit

NOT_GIVEN = ("__pycache__", ".git")
"""Left out of the folders that an agent is given, and of what it leaves: caches would be believed instead of the source
beside them; git knows more than the recipe gives, and an agent's repository can say what programs git is to run."""


def base_environment(home: str, tmp: str, task_file: str) -> dict[str, str]:
    """What every agent sees, wherever it runs, besides PATH and what the launch names."""
    return {
        "HOME": home,
        "TMPDIR": tmp,
        "AGLITE_TASK_FILE": task_file,
        "LANG": "C.UTF-8",
        "SHELL": "/bin/sh",
        "USER": "agent",
        "LOGNAME": "agent",
        # what an agent printed before it was ended is in its log
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(frozen=True, slots=True)
class Launch:
    """One attempt, as a backend is asked to run it."""

    rollout_id: str
    attempt: int
    command: Sequence[str]
    files: Sequence[tuple[Path, str]]
    """(file or folder, its place relative to the agent's working directory)."""
    home_files: Mapping[str, str]
    """Text of files by their place relative to the agent's HOME: what a harness is configured with."""
    stdin: str
    """What the agent reads from its standard input."""
    task: Mapping[str, Any]
    """The task's public part; the backend puts it in a file and its path in AGLITE_TASK_FILE."""
    env: Mapping[str, str]
    """What the agent must see besides the backend's own base environment (PATH, HOME, ...)."""
    limits: Limits
    log: Path
    """Where the backend keeps the agent's output, from the first byte on, within `limits.log_bytes`."""
    redactor: Redactor
    """Masks the output before it is written; false: it is kept as it is."""
    tree: Path | None = None
    """A folder whose content is put in the working directory, links as links; `files` come over it. In containers."""
    cwd: str = "work"
    """Folder that `files` are put in and the program starts in: the working directory or, in containers, another one
    beside it."""


class Running(Protocol):
    """One attempt that was started."""

    exited: asyncio.Future[Exit]
    """Done when the agent has ended by itself or was ended."""
    workdir: Path
    """What the agent left; stands still once `stop` has returned, until `remove`."""
    flags: Collection[str]
    """What is worth knowing of what the agent left; final after `stop`."""
    left_out: int
    """Bytes of output that the log does not hold; final after `stop`."""
    last_line: str
    """The last line that the agent printed."""
    said: bytes
    """The end of what it printed, unmasked; of its standard output alone where a backend can tell."""

    async def stop(self, grace_s: float = 0.0) -> Sequence[object]:
        """End the agent (SIGTERM, then SIGKILL after `grace_s`) and everything it started: nothing of it runs then.

        Also called after the agent has ended by itself; again does nothing. Returns what had outlived the agent, where
        a backend can tell. Raises BackendError if what the agent left is lost.
        """
        ...

    async def remove(self) -> None:
        """Delete what the attempt left on disk, its log excepted."""
        ...


class Backend(Protocol):
    name: str
    base_url: str | None
    """Where its agents reach the gateway, if not where programs of this machine do."""
    starts_slowly: bool
    """Whether `start` may take minutes. Then it can be cancelled, and leaves nothing."""

    async def open(self) -> Mapping[str, Any]:
        """Be ready, and delete what an earlier supervisor of this run left. Raises RecipeError if the recipe asks for
        what is not there. Returns what is worth keeping of the place: versions, the image's digest."""
        ...

    async def close(self) -> None:
        """Give back what `open` took, after all attempts have ended."""
        ...

    async def start(self, launch: Launch) -> Running:
        """Start an attempt. Raises RecipeError if the recipe asks for what is not there, OSError or BackendError if
        this place cannot run it at the moment (another attempt may)."""
        ...

    async def sweep(self) -> Sequence[object]:
        """End and delete whatever attempts of this run exist, also those of an earlier supervisor; what there was."""
        ...
