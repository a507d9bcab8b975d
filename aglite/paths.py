"""Where a run keeps its files, and how its things are named."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where files lie in memory."""
SOCKET_BYTES = 107
"""Length of the longest path that a Unix socket can have."""

ROLLOUT_ID = "AGLITE_ROLLOUT_ID"
"""Variable in the environment of all processes of a rollout: its id. They are found by it."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run, all under one directory."""

    path: Path

    @property
    def holds_run(self) -> bool:
        """Whether there is a run in it, at work or recorded."""
        return self.db.exists() or self.control.exists()

    @property
    def db(self) -> Path:
        return self.path / "aglite.db"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def control(self) -> Path:
        """`{"url", "token", "pid"}` of the running supervisor; absent when none runs."""
        return self.path / "control.json"

    @property
    def lock(self) -> Path:
        """Held with flock by the supervisor: one a run directory."""
        return self.path / "supervisor.lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tracking(self) -> Path:
        """What trackers write, and what they note of it."""
        return self.path / "tracking"

    @property
    def scratch(self) -> Path:
        """Working directories of local rollouts, removed after grading."""
        return self.path / "scratch"

    @property
    def transfer(self) -> Path:
        """New weights on their way to vLLM, where they do not fit into memory."""
        return self.path / "transfer"

    def rollout_log(self, rollout_id: str, attempt: int) -> Path:
        return self.logs / "rollouts" / f"{rollout_id}.{attempt}.log"

    def create(self) -> None:
        for folder in (self.path, self.logs, self.logs / "rollouts", self.checkpoints, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)


def near_tmp(more: int) -> Path:
    """Where a folder is made that holds Unix sockets: TMPDIR, or where that leads too deep, as in a cluster's jobs,
    /tmp itself. `more`: bytes of the sockets' paths from there on."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) + more <= SOCKET_BYTES else "/tmp")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def new_id(kind: str) -> str:
    """A new random name: `r-...` for rollouts, `g-...` for groups."""
    return f"{kind}-{secrets.token_hex(5)}"
