"""Weights & Biases. Offline unless WANDB_MODE says otherwise: then nothing leaves the machine until `wandb sync`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from aglite.tracking.missing import library
from aglite.tracking.points import About, Point

STEP = "step"
"""The x axis. wandb's own steps only ever grow, and an evaluation comes after the step that it is of."""

QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "host": "",
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}
"""Numbers and settings are told, and nothing of this machine, its programs or what they print."""


class Wandb:
    def __init__(self, folder: Path) -> None:
        library("wandb")
        self._folder = folder
        self._mode = os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = None

    @property
    def keeps(self) -> bool:
        """Runs at the service are gone on with; one that is on the disk only is written anew."""
        return self._mode != "offline"

    def open(self, run: About, generation: int, fresh: bool) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        id = run.id if self._mode == "offline" or not generation else f"{run.id}-{generation}"
        if self._mode == "offline":
            for old in (self._folder / "wandb").glob(f"offline-run-*-{id}"):
                if not list(old.glob("*.synced")):
                    shutil.rmtree(old)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "aglite",
            id=id,
            name=run.name if id == run.id else f"{run.name} ({generation})",
            dir=str(self._folder),
            mode=self._mode,
            resume="allow" if self.keeps else None,
            config=run.settings,
            settings=wandb.Settings(**QUIET),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, point: Point) -> None:
        self._run.log({STEP: point.step, "_timestamp": point.at, **point.values})

    def flush(self) -> None:
        pass  # a process of wandb's own writes, about once a second

    def close(self) -> None:
        self._run.finish()
