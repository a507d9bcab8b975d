"""What a report says of one run, read from its database: plain data, with what `redact` masks already masked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aglite.client import ControlClient
from aglite.export import flat
from aglite.history import live_steps
from aglite.paths import RunDir
from aglite.shown import redactor_of, shown, shown_result, shown_settings
from aglite.store import Store
from aglite.store.old import readable
from aglite.training.scores import paired_difference
from aglite.units import plain_json

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NOTES = 30
"""Warnings and errors that are told of a run, the last ones."""


@dataclass
class Run:
    """One run as a report tells it. Times are Unix seconds, durations seconds."""

    name: str
    folder: str
    model: str
    state: str
    """going, finished, stopped, or died while in a phase"""
    started_at: float | None
    steps: list[dict[str, Any]]
    """Those that hold, in order: {step, version, state, metrics, started_at, finished_at}."""
    wanted_steps: int
    evaluations: list[dict[str, Any]]
    """The finished ones of validation tasks, in order."""
    gain: dict[str, float] | None
    """From the first to the last of them, over the tasks that both have: see `paired_difference`."""
    best: dict[str, Any] | None
    """The best checkpoint: {step, path}."""
    phases: list[dict[str, Any]]
    """{phase, start, seconds}: what the accelerator did, `start` counted without the time the run was stopped."""
    durations: dict[str, dict[str, Any]]
    """Of rollouts, by split: {n, quantiles, longest}."""
    queue: dict[str, int]
    causes: dict[str, int]
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any]
    """The resolved recipe, a setting a key (`trainer.lr`)."""
    versions: dict[str, str]
    notes: list[dict[str, Any]]

    @cached_property
    def measured(self) -> list[tuple[int, dict[str, float]]]:
        """Each step with its metrics, the inner ones as `outer.inner`."""
        return [(step["step"], flat(step["metrics"])) for step in self.steps]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By phase, in the order in which they first came."""
        sums: dict[str, float] = {}
        for phase in self.phases:
            sums[phase["phase"]] = sums.get(phase["phase"], 0.0) + phase["seconds"]
        return sums


def read_run(run_dir: RunDir, now: float | None = None) -> Run:
    """Read a run that is going, has ended, or was recorded by an older aglite. Raises StoreError."""
    now = time.time() if now is None else now
    going = ControlClient(run_dir).pid is not None
    with readable(run_dir.db) as store:
        return _read(store, run_dir, now if going else None)


def _read(store: Store, run_dir: RunDir, now: float | None) -> Run:
    """`now` is None for a run that is not going."""
    redactor = redactor_of(store)
    manifest = store.meta("manifest") or {}
    recipe = manifest.get("recipe") or {}
    steps = live_steps(store)
    evaluations = [row for row in store.evaluations() if row["state"] == "done" and row["split"] == "val"]
    phases = store.phases(limit=-1)
    best = next((row for row in store.checkpoints() if row["best"] and row["state"] == "kept"), None)
    gain = None
    if len(evaluations) > 1:
        rewards = [store.evaluation_rewards(evaluations[place]["id"]) for place in (0, -1)]
        gain = paired_difference(*rewards) if all(rewards) else None
    wanted = (recipe.get("trainer") or {}).get("steps", 0)
    return Run(
        name=recipe.get("name", run_dir.path.resolve().name),
        folder=str(run_dir.path),
        model=recipe.get("model", ""),
        state=_state(phases, now, steps, wanted),
        started_at=phases[0]["started_at"] if phases else None,
        steps=steps,
        wanted_steps=wanted,
        evaluations=[{**row, "result": plain_json(shown_result(row["result"], redactor))} for row in evaluations],
        gain=gain,
        best={"step": best["step"], "path": best["path"]} if best else None,
        phases=_active(phases, now, store.last_sign()),
        durations={split: _distribution(store.durations(split)) for split in ("train", "val")},
        queue=store.counts_by_state(),
        causes={redactor.text(cause): count for cause, count in store.counts_by_cause().items()},
        tokens=store.tokens(),
        settings=shown_settings(recipe, redactor),
        versions=manifest.get("versions") or {},
        notes=plain_json(shown(store.problems(NOTES), redactor)),
    )


def _state(phases: Sequence[dict[str, Any]], now: float | None, steps: list[dict[str, Any]], wanted: int) -> str:
    if now is not None:
        return f"going ({phases[-1]['phase']})" if phases else "going"
    if phases and phases[-1]["phase"] != "stopped":
        return f"died while {phases[-1]['phase']}"
    return "finished" if steps and steps[-1]["step"] >= wanted else "stopped"


def _active(rows: Sequence[dict[str, Any]], now: float | None, last_sign: float | None) -> list[dict[str, Any]]:
    """Phases without those in which nothing ran, one after the other. One that never ended did until now, or until the
    run's last sign of life."""
    found: list[dict[str, Any]] = []
    start = 0.0
    for row in rows:
        if row["phase"] == "stopped":
            continue
        end = row["finished_at"] or now or max(last_sign or 0.0, row["started_at"])
        seconds = max(0.0, end - row["started_at"])
        found.append({"phase": row["phase"], "start": start, "seconds": seconds})
        start += seconds
    return found


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    """Of sorted values: how many, their quantiles (the smallest value that at least this share does not exceed), the
    largest."""
    n = len(values)
    places = [max(0, -int(-share * n // 1) - 1) for share in QUANTILES]
    return {
        "n": n,
        "quantiles": [values[place] for place in places] if n else [],
        "longest": values[-1] if n else 0.0,
    }
