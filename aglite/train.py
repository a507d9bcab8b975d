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

from pydantic import ValidationError

import aglite
from aglite.blocking import abandonable
from aglite.config import RESUMABLE, Recipe
from aglite.errors import AgliteError, RecipeError
from aglite.lock import hold
from aglite.paths import RunDir, write_private
from aglite.runtime import without_keys
from aglite.steering import QUARANTINE
from aglite.supervisor import Supervisor, usable
from aglite.tasks import load_tasks, tasks_hash
from aglite.tracking.children import Trackers
from aglite.training.loop import TrainingLoop
from aglite.training.scores import comparable, enough, paired_difference
from aglite.training.state import LoopState
from aglite.versions import check_versions


def train(recipe: Recipe, run_dir: RunDir, *, mode: str, on_line: Callable[[str], None]) -> int:
    """Train in the foreground; returns the exit code. `mode`: auto, resume or fresh. Raises AgliteError."""
    if recipe.engine.url:
        raise RecipeError(
            f"engine.kind: {recipe.engine.kind} at a url cannot be trained: new weights cannot be put into an engine "
            "that somebody else runs",
            "train with `engine: {kind: vllm}` without a url, or {kind: embedded}; `aglite run`, `eval` and `serve` "
            "work with this one",
        )
    check_versions(recipe, on_line)
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
    restarts = 2

    async def work(self) -> int:
        self._check_same_run()
        train_rows = await abandonable(load_tasks, self.recipe.tasks.train, self.recipe.folder, "train")
        val_rows = await abandonable(load_tasks, self.recipe.tasks.val, self.recipe.folder, "val")
        await self._write_manifest(train_rows, val_rows)
        await self.store.add_tasks("train", train_rows)
        await self.store.add_tasks("val", val_rows)
        await abandonable(tidy_checkpoints, self.run_dir.checkpoints)
        checkpoint = self._last_checkpoint()
        if checkpoint is not None and (done := self._done(checkpoint["step"])):
            self.on_line(f"{done}, or begin anew with --fresh")
            await self.keep_to_retention()
            return 0
        await self.runtime.start(self.recipe.model, trainer=True)
        loop = TrainingLoop(self.runtime, self.phases, train_rows, val_rows)
        loop.order.quarantined.update(self.store.meta(QUARANTINE, []))
        if checkpoint is not None:
            path = self.run_dir.path / checkpoint["path"]
            meta = await self.runtime.worker.load(path)
            known = {field.name for field in fields(LoopState)}
            await self._restore(loop, LoopState(**{k: v for k, v in meta["loop"].items() if k in known}))
            self.on_line(f"going on from {path.name} (policy version {loop.state.version})")
        elif self.store.groups():
            await self._restore(loop, LoopState())
            self.on_line("going on from the beginning: no checkpoint had been written")
        await self.keep_to_retention()
        await self._start_trackers()
        await self.runtime.worker.resume(loop.state.version)
        self.loop = loop
        if self._stop_after_step:
            loop.stop_after_step()
        if self._stop_asked:
            return 0
        await loop.run()
        if not loop.stopping:
            if why := loop.ended_early:
                await self.store.add_event("info", "run", f"ended early after step {loop.state.step}: {why}")
            await loop.checkpoint("done")
            self._report(loop.state.step)
        return 0

    async def _start_trackers(self) -> None:
        trackers = Trackers(
            self.recipe.tracking, self.run_dir, self.store, self.runtime.reaper, without_keys(self.recipe)
        )
        self.runtime.also_stop(trackers)
        await trackers.start()

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

    def _done(self, step: int) -> str:
        """That nothing is left to do after `step`, and how to go on all the same; '' if something is left: also an
        evaluation at the end that was interrupted."""
        rows = [row for row in self.store.evaluations() if row["step"] <= step]
        if why := enough(comparable(rows), self.recipe.evaluation.patience):
            return f"the run ended early after step {step}: {why}; go on with --set evaluation.patience=null"
        evaluated = any(row["step"] == step and row["state"] == "done" for row in rows)
        if step < self.recipe.trainer.steps or not (evaluated or self.recipe.agent.backend == "external"):
            return ""
        return f"all {step} steps are done; train on with --steps {step + 10}"

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
        changed = list(_differences(_with_defaults(manifest["recipe"]), self.recipe.dump()))
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
        write_private(self.run_dir.recipe, self.recipe.to_yaml())

    def _report(self, step: int) -> None:
        """Say what was learned and where it is."""
        done = comparable(self.store.evaluations())
        if len(done) > 1:
            before, after = done[0], done[-1]
            first, last = before["result"], after["result"]
            self.on_line(
                f"validation reward {first['mean']:.3f} ± {first['stderr']:.3f} before, "
                f"{last['mean']:.3f} ± {last['stderr']:.3f} after ({last['n']} held-out tasks, same seeds)"
            )
            gain = paired_difference(*(self.store.evaluation_rewards(row["id"]) for row in (before, after)))
            self.on_line(f"  task by task {gain['mean']:+.3f} (95%: {gain['low']:+.3f} to {gain['high']:+.3f})")
            for kind, value in last["by_kind"].items():
                self.on_line(f"  {kind}: {first['by_kind'].get(kind, 0.0):.3f} -> {value:.3f}")
        folder, path = self.run_dir.checkpoints, self.run_dir.checkpoints / f"step-{step}"
        self.on_line(f"checkpoint: {path}")
        best = next((row["step"] for row in self.store.checkpoints() if row["best"]), step)
        if best != step:
            path = folder / f"step-{best}"
            self.on_line(f"did best in validation: {path}")
        self.on_line(f"use it: aglite serve {path}")


def _with_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe that an earlier aglite resolved, with the defaults of settings that it did not know; as it is where it
    has some that are no more."""
    try:
        return Recipe.model_validate(recipe).dump()
    except ValidationError:
        return recipe


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
