"""Where a run keeps its files, and how its things are named."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run, all under one directory."""

    path: Path

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
    def scratch(self) -> Path:
        """Working directories of local rollouts, removed after grading."""
        return self.path / "scratch"

    def rollout_log(self, rollout_id: str, attempt: int) -> Path:
        return self.logs / "rollouts" / f"{rollout_id}.{attempt}.log"

    def create(self) -> None:
        for folder in (self.path, self.logs, self.logs / "rollouts", self.checkpoints, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)


def new_id(kind: str) -> str:
    """A new random name: `r-...` for rollouts, `g-...` for groups."""
    return f"{kind}-{secrets.token_hex(5)}"
