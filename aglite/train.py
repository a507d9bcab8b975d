"""`aglite up`: begin a run or go on with one, train it, and say what was learned."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import aglite
from aglite.blocking import abandonable
from aglite.config import RESUMABLE, Recipe
from aglite.errors import AgliteError
from aglite.lock import hold
from aglite.models import resolve_model
from aglite.paths import RunDir
from aglite.supervisor import Supervisor, usable
from aglite.tasks import load_tasks, tasks_hash
from aglite.training.loop import LoopState, TrainingLoop


def train(recipe: Recipe, run_dir: RunDir, *, mode: str, on_line: Callable[[str], None]) -> int:
    """Train in the foreground; returns the exit code. `mode`: auto, resume or fresh. Raises AgliteError."""
    exists = run_dir.db.exists()
    if mode == "resume" and not exists:
        raise AgliteError(f"no run to go on with in {run_dir.path}", "leave out --resume to begin one")
    if mode == "fresh" and exists:
        on_line(f"the earlier run is now {_set_aside(run_dir)}")
    return TrainSupervisor(recipe, run_dir, on_line).run()


def _set_aside(run_dir: RunDir) -> Path:
    """Rename an old run directory after the time; refuses while it is in use."""
    with usable(run_dir):
        hold(run_dir).close()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = run_dir.path.with_name(f"{run_dir.path.name}.{stamp}")
    for count in range(1, 100):
        if not aside.exists():
            break
        aside = run_dir.path.with_name(f"{run_dir.path.name}.{stamp}-{count}")
    with usable(run_dir):
        run_dir.path.rename(aside)
    return aside


def tidy_checkpoints(folder: Path) -> None:
    """Clear away what a death in the middle of writing a checkpoint left: nobody else would, and each is gigabytes.

    `step-N.tmp` is a part of one; `step-N.old` is the whole one that was about to be replaced, put back if it was not.
    """
    for part in folder.glob("*.tmp"):
        shutil.rmtree(part, ignore_errors=True)
    for replaced in folder.glob("*.old"):
        if replaced.with_suffix("").exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(replaced.with_suffix(""))


class TrainSupervisor(Supervisor):
    """Trains a recipe from its beginning or from the last checkpoint of its run directory."""

    trains = True

    async def work(self) -> int:
        self._check_same_run()
        train_rows = await abandonable(load_tasks, self.recipe.tasks.train, self.recipe.folder, "train")
        val_rows = await abandonable(load_tasks, self.recipe.tasks.val, self.recipe.folder, "val")
        await self._write_manifest(train_rows, val_rows)
        await self.store.add_tasks("train", train_rows)
        await self.store.add_tasks("val", val_rows)
        model_dir = await abandonable(resolve_model, self.recipe.model, self.on_line)
        await abandonable(tidy_checkpoints, self.run_dir.checkpoints)
        checkpoint = self._last_checkpoint()
        if checkpoint is not None and self._complete(checkpoint["step"]):
            self.on_line(
                f"all {checkpoint['step']} steps are done; train on with --steps {checkpoint['step'] + 10}, "
                "or begin anew with --fresh"
            )
            return 0
        await self.runtime.start(model_dir, trainer=True)
        loop = TrainingLoop(self.runtime, self.phases, train_rows, val_rows)
        if checkpoint is not None:
            path = self.run_dir.path / checkpoint["path"]
            meta = await self.runtime.worker.load(path)
            known = {field.name for field in fields(LoopState)}
            await self._restore(loop, LoopState(**{k: v for k, v in meta["loop"].items() if k in known}))
            self.on_line(f"going on from {path.name} (policy version {loop.state.version})")
        elif self.store.groups():
            await self._restore(loop, LoopState())
            self.on_line("going on from the beginning: no checkpoint had been written")
        await self.runtime.worker.resume(loop.state.version)
        self.loop = loop
        if self._stop_asked:
            return 0
        await loop.run()
        if not loop.stopping:
            await loop.checkpoint("done")
            await self._report()
        return 0

    async def finish(self) -> None:
        """End the rollouts in flight, keep them for the next start, and write a checkpoint."""
        loop = self.loop
        if loop is None or not loop.stopping:
            return
        loop.groups.stopping = True
        self.runtime.gateway.gate.close()
        if self.runtime.launcher is not None:
            await self.runtime.launcher.stop()
        await loop.groups.drain()
        for group in loop.groups.open.values():
            for rollout_id, outcome in group.members.items():
                if outcome is None:
                    await self.store.set_rollout_state(rollout_id, "queued", cause="run stopped")
        path = await loop.checkpoint("stopped")
        self.on_line(f"stopped after step {loop.state.step}; checkpoint {path}; `aglite up` goes on from here")

    def _complete(self, step: int) -> bool:
        """Whether nothing is left to do after `step`: an evaluation at the end may have been interrupted."""
        if step < self.recipe.trainer.steps:
            return False
        evaluated = any(row["step"] == step and row["state"] == "done" for row in self.store.evaluations())
        return evaluated or self.recipe.agent.backend == "external"

    def _last_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that is on disk."""
        kept = [row for row in self.store.checkpoints() if row["state"] == "kept"]
        for row in reversed(kept):
            if (self.run_dir.path / row["path"] / "aglite.json").is_file():
                return row
        return None

    async def _restore(self, loop: TrainingLoop, state: LoopState) -> None:
        """Put the store back to what the checkpoint knows, then the loop."""
        await self.store.roll_back(state.version, keep_groups=state.open_groups)
        done = [row["step"] for row in self.store.evaluations() if row["state"] == "done" and row["step"] <= state.step]
        state.evaluated = max(done, default=-1)
        await loop.restore(state)

    def _check_same_run(self) -> None:
        """Refuse to go on under a recipe that makes it a different run."""
        manifest = self.store.meta("manifest")
        if manifest is None:
            return
        changed = list(_differences(manifest["recipe"], self.recipe.dump()))
        forbidden = [text for key, text in changed if not any(key == k or key.startswith(f"{k}.") for k in RESUMABLE)]
        if forbidden:
            raise AgliteError(
                f"the recipe is not the one of the run in {self.run_dir.path}: " + "; ".join(forbidden),
                "put it back as it was to go on, or begin anew with --fresh (the old run is kept under another name)",
            )

    async def _write_manifest(self, train_rows: list[dict[str, Any]], val_rows: list[dict[str, Any]]) -> None:
        hashes = {"train": tasks_hash(train_rows), "val": tasks_hash(val_rows)}
        earlier = self.store.meta("manifest")
        if earlier is not None and earlier["tasks"] != hashes:
            raise AgliteError(
                f"the tasks are not those of the run in {self.run_dir.path}",
                "put them back as they were to go on, or begin anew with --fresh",
            )
        manifest = {
            "recipe": self.recipe.dump(),
            "folder": str(self.recipe.folder),
            "tasks": hashes,
            "seed": self.recipe.seed,
            "versions": _versions(),
            "git_commit": _git_commit(self.recipe.folder),
            "hardware": {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
            "started_at": earlier["started_at"] if earlier else self.started_at,
        }
        await self.store.set_meta("manifest", manifest)
        self.run_dir.recipe.write_text(self.recipe.to_yaml())

    async def _report(self) -> None:
        """Say what was learned and where it is."""
        done = [row for row in self.store.evaluations() if row["state"] == "done"]
        assert self.loop is not None
        path = self.run_dir.checkpoints / f"step-{self.loop.state.step}"
        before, after = (done[0], done[-1]) if done else (None, None)
        if before and after and before is not after:
            first, last = before["result"], after["result"]
            self.on_line(
                f"validation reward {first['mean']:.3f} ± {first['stderr']:.3f} before, "
                f"{last['mean']:.3f} ± {last['stderr']:.3f} after ({last['n']} held-out tasks, same seeds)"
            )
            for kind, value in last["by_kind"].items():
                self.on_line(f"  {kind}: {first['by_kind'].get(kind, 0.0):.3f} -> {value:.3f}")
        self.on_line(f"checkpoint: {path}")
        self.on_line(f"use it: aglite serve {path}")


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key in sorted(old.keys() | new.keys()):
        name = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict) and name != "agent.env":
            found += _differences(before, after, f"{name}.")
        elif before != after:
            found.append((name, f"{name} was {json.dumps(before)} and is now {json.dumps(after)}"))
    return found


def _versions() -> dict[str, str]:
    found = {"aglite": aglite.__version__, "python": platform.python_version()}
    for name in ("torch", "verl", "transformers", "tensordict", "renderers", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git_commit(folder: Path) -> str:
    """The commit of the repository that holds the recipe, with a mark if it has changes; '' outside of one."""
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()
