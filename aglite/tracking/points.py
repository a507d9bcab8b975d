"""What of a run is tracked: its steps and evaluations as named numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from aglite.export import flat
from aglite.history import live_steps
from aglite.shown import redactor_of, shown_result, shown_settings
from aglite.store import Store

Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclass(slots=True, frozen=True)
class Point:
    """A step or an evaluation. Names of its values begin with `train/` or `validation/`."""

    key: str
    """Its own for ever: another step of the same number, after a roll back, has another."""
    step: int
    at: float
    """Unix time in seconds."""
    values: dict[str, float]


@dataclass(slots=True, frozen=True)
class About:
    """Which run it is."""

    id: str
    """The same whenever the run goes on, and no other run's."""
    name: str
    settings: dict[str, Any]


def points(store: Store) -> list[Point]:
    """All that holds, in the order in which it came about; what was rolled back is left out."""
    found = [
        Point(f"s{row['id']}", row["step"], row["finished_at"], _named("train", row["metrics"]))
        for row in live_steps(store)
    ]
    redactor = redactor_of(store)
    for row in store.evaluations():
        if row["state"] != "done":
            continue
        values = _named(row["split"].replace("val", "validation"), shown_result(row["result"], redactor))
        found.append(Point(f"e{row['id']}", row["step"], row["finished_at"], values))
    return sorted(found, key=lambda point: point.at)


def about(store: Store) -> About:
    manifest = store.meta("manifest") or {}
    recipe = manifest.get("recipe") or {}
    name = recipe.get("name", "run")
    digest = hashlib.sha256(f"{name} {manifest.get('started_at')}".encode()).hexdigest()[:8]
    return About(f"{name}-{digest}", name, shown_settings(recipe, redactor_of(store)))


def _named(prefix: str, numbers: dict[str, Any]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in flat(numbers).items()}
