"""Where agents run. One class a place, behind one interface; `agent.backend` in the recipe chooses.

A backend starts one attempt, sees it end, ends it and whatever it started, and hands out what it left. It knows nothing
of models, rewards or states: those are the launcher's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aglite.config import Limits
from aglite.rollouts.process import Exit


@dataclass(frozen=True, slots=True)
class Launch:
    """One attempt, as a backend is asked to run it."""

    rollout_id: str
    attempt: int
    command: Sequence[str]
    files: Sequence[tuple[Path, str]]
    """(file or folder, its place relative to the agent's working directory)."""
    task: Mapping[str, Any]
    """The task's public part; the backend puts it in a file and its path in AGLITE_TASK_FILE."""
    env: Mapping[str, str]
    """What the agent must see besides the backend's own base environment (PATH, HOME, ...)."""
    limits: Limits
    log: Path
    """Where the backend keeps the agent's output, from the first byte on, within `limits.log_bytes`."""


class Running(Protocol):
    """One attempt that was started."""

    exited: asyncio.Future[Exit]
    """Done when the agent has ended by itself or was ended."""
    workdir: Path
    """What the agent left; stands still once `stop` has returned, until `remove`."""
    left_out: int
    """Bytes of output that the log does not hold; final after `stop`."""
    last_line: str
    """The last line that the agent printed."""

    async def stop(self, grace_s: float = 0.0) -> list[int]:
        """End the agent (SIGTERM, then SIGKILL after `grace_s`) and everything it started: nothing of it runs then.

        Also called after the agent has ended by itself. Returns what had outlived the agent, by process id.
        """
        ...

    async def remove(self) -> None:
        """Delete what the attempt left on disk, its log excepted."""
        ...


class Backend(Protocol):
    name: str

    async def start(self, launch: Launch) -> Running:
        """Start an attempt. Raises RecipeError if the recipe asks for what is not there, OSError if this place cannot
        run it at the moment (another attempt may)."""
        ...

    async def sweep(self) -> list[int]:
        """End and delete whatever attempts of this run exist. At start: those of an earlier supervisor. At stop: none
        should be left; what was is returned, by process id."""
        ...
