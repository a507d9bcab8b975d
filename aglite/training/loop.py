"""The training loop: keep groups in flight, train when enough are complete, evaluate and checkpoint in between."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from aglite.errors import AgliteError
from aglite.evaluation import Evaluation
from aglite.phases import PhaseMachine
from aglite.runtime import Runtime
from aglite.training.advantage import update_baseline
from aglite.training.batch import Batch, build_batch
from aglite.training.groups import Group, Groups
from aglite.training.pauses import DISK_POLL_S, Pauses, folder_mb, wait


@dataclass(slots=True)
class LoopState:
    """What a checkpoint must hold, besides weights and optimizer, for the run to go on exactly."""

    step: int = 0
    version: int = 0
    cursor: int = 0
    """Tasks started so far; the order of each epoch follows from the recipe's seed."""
    baseline: float | None = None
    open_groups: list[str] = field(default_factory=list)
    """Groups started but not trained when the checkpoint was written."""
    evaluated: int = -1
    """The last step that was evaluated."""


class TrainingLoop:
    """Runs the recipe's steps on a started Runtime. `run` returns when they are done or a stop was asked for."""

    def __init__(
        self, runtime: Runtime, phases: PhaseMachine, train: list[dict[str, Any]], val: list[dict[str, Any]]
    ) -> None:
        self.runtime = runtime
        self.recipe = runtime.recipe
        self.store = runtime.store
        self.phases = phases
        self.state = LoopState()
        self.groups = Groups(self.store, runtime.launcher, self.recipe, smallest=1 if self.grouped_alone else 2)
        self.evaluation: Evaluation | None = None
        self.stopping = False
        self._train, self._val = train, val
        self._tasks = {("train", row["id"]): row for row in train}
        self._wake = asyncio.Event()
        self._pauses = Pauses(runtime, phases, self._wake)
        self._evaluate_now = self._checkpoint_now = False
        self._checkpointed = 0
        self._step_times: list[float] = []

    @property
    def grouped_alone(self) -> bool:
        """Whether a group of one is worth training."""
        return self.recipe.algorithm.name == "reinforce"

    @property
    def paused(self) -> str:
        """Why the run is paused, or about to be; '' when it is not."""
        return self._pauses.held or self._pauses.asked

    # what a person can ask for while it runs

    def stop(self) -> None:
        """End after what cannot be interrupted (an update); unfinished rollouts are taken up by the next start."""
        self.stopping = True
        self._notify()

    def pause(self, why: str) -> None:
        self._pauses.asked = why
        self._notify()

    def resume(self) -> None:
        self._pauses.asked = ""
        self._notify()

    def evaluate_soon(self) -> None:
        self._evaluate_now = True
        self._notify()

    def checkpoint_soon(self) -> None:
        self._checkpoint_now = True
        self._notify()

    def _notify(self) -> None:
        self._wake.set()
        self.groups.changed.set()
        if self.evaluation:
            self.evaluation.groups.changed.set()

    def eta_s(self) -> float | None:
        """Seconds until the last step at the pace of the last few, or None before the first."""
        if not self._step_times:
            return None
        recent = self._step_times[-5:]
        return (self.recipe.trainer.steps - self.state.step) * sum(recent) / len(recent)

    # the run

    async def run(self) -> None:
        """Train until the recipe's steps are done or `stop` is called. Raises AgliteError when it cannot go on."""
        steps = self.recipe.trainer.steps
        if self.owes_evaluation:
            await self._evaluate(f"after step {self.state.step}" if self.state.step else "before training")
        if self.phases.current != "rollout" and not self.stopping:
            await self.phases.set("rollout")
        while self.state.step < steps and not self.stopping:
            started = time.monotonic()
            batch = await self._collect()
            if batch is None:
                continue
            await self._update(batch)
            self._step_times.append(time.monotonic() - started)
            if self.owes_evaluation and not self.stopping:
                await self._evaluate(f"after step {self.state.step}")
            every = self.recipe.trainer.checkpoint_every
            due = self.state.step // every > self._checkpointed // every
            if due and self.state.step < steps and not self.stopping:
                await self.checkpoint("every few steps")

    @property
    def owes_evaluation(self) -> bool:
        """Whether the policy in force has to be evaluated and was not: also because the one before was interrupted."""
        settings, step = self.recipe.evaluation, self.state.step
        if self.runtime.launcher is None or self.state.evaluated >= step:
            return False  # without a launcher, validation rollouts are recorded as others launch them
        if step == 0:
            return settings.before
        if step >= self.recipe.trainer.steps:
            return True
        # an update may make several steps at once and pass by the very step that was due
        return settings.every > 0 and step // settings.every > max(self.state.evaluated, 0) // settings.every

    async def _collect(self) -> list[Group] | None:
        """Wait for the groups of one step; None when something else has to be looked at first."""
        wanted = self.recipe.algorithm.groups_per_step
        while not self.stopping:
            if self.groups.failure:
                raise self.groups.failure
            if self._evaluate_now:
                self._evaluate_now = False
                await self._evaluate("asked for")
                await self.phases.set("rollout")
            if self._checkpoint_now:
                self._checkpoint_now = False
                await self.checkpoint("asked for")
            await self._hold_if_wanted()
            if self.stopping:
                return None
            await self._fill()
            if len(self.groups.complete) >= wanted:
                return [self.groups.complete.popleft() for _ in range(wanted)]
            self.groups.changed.clear()
            await wait(self.groups.changed, DISK_POLL_S)
        return None

    async def _fill(self) -> None:
        """Start groups up to the number in flight, but none that the remaining steps cannot train."""
        algorithm = self.recipe.algorithm
        remaining = (self.recipe.trainer.steps - self.state.step) * algorithm.groups_per_step
        while True:
            in_flight = len(self.groups.open)
            ahead = in_flight + len(self.groups.complete)
            limit = self.recipe.groups_in_flight
            # sync: nothing of the next step starts before this one is trained
            busy = ahead if algorithm.mode == "sync" else in_flight
            if busy >= limit or ahead >= remaining or self.runtime.launcher is None:
                return
            task = self._task(self.state.cursor)
            self.state.cursor += 1
            await self.groups.start(task, "train", algorithm.group_size, version=self.state.version)

    def _task(self, cursor: int) -> dict[str, Any]:
        """Task number `cursor` of the run: each epoch is a shuffle that only the seed and the epoch decide."""
        epoch, position = divmod(cursor, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"{self.recipe.seed}:{epoch}").shuffle(order)
        return self._train[order[position]]

    async def _update(self, groups: list[Group]) -> None:
        """Close the gate, train on `groups` (and on every further step's worth that is complete), reopen."""
        runtime = self.runtime
        await self.phases.set("draining", self.recipe.gateway.close)
        runtime.gateway.gate.close()
        if self.recipe.gateway.close == "drain":
            await runtime.gateway.idle(self.recipe.gateway.drain_timeout_s)
        await runtime.worker.preempt()
        await self.phases.set("training", f"step {self.state.step + 1}")
        wanted = self.recipe.algorithm.groups_per_step
        await self._train_step(groups)
        while len(self.groups.complete) >= wanted and self.state.step < self.recipe.trainer.steps and not self.stopping:
            await self._train_step([self.groups.complete.popleft() for _ in range(wanted)])
        await self.phases.set("syncing")
        await runtime.worker.resume(self.state.version)
        runtime.gateway.gate.open()
        await self.phases.set("rollout")

    async def _train_step(self, groups: list[Group]) -> None:
        started = time.time()
        step = self.state.step + 1
        batch = await asyncio.to_thread(self._build, groups)
        result: dict[str, Any] = {"applied": False, "seconds": 0.0}
        if batch.message is not None:
            self.runtime.progress = {}
            result = await self.runtime.worker.train(batch.message)
        if result["applied"]:
            self.state.version = self.store.next_version()
        elif batch.message is not None:
            await self.store.add_event(
                "error", "step", f"step {step}: loss or gradient was not finite; the update is not applied"
            )
        rewards = [reward for group in groups for reward in group.rewards()]
        self.state.baseline = update_baseline(self.state.baseline, rewards)
        await self._record(step, groups, batch, result, started)
        self.state.step = step

    def _build(self, groups: list[Group]) -> Batch:
        return build_batch(
            [group.graded() for group in groups],
            self.store.calls,
            self.recipe,
            version=self.state.version,
            baseline=self.state.baseline,
            lr=self._learning_rate(),
        )

    def _learning_rate(self) -> float:
        trainer = self.recipe.trainer
        return trainer.lr * min(1.0, (self.state.step + 1) / (trainer.warmup_steps + 1))

    async def _record(
        self, step: int, groups: list[Group], batch: Batch, result: dict[str, Any], started: float
    ) -> None:
        computed = {key: value for key, value in result.items() if key not in ("applied", "trained_tokens", "tokens")}
        metrics = {**batch.metrics, **computed}
        metrics["lr"] = self._learning_rate()
        metrics["groups_dropped"] = self.groups.dropped
        state = "applied" if result["applied"] else "skipped"
        await self.store.add_step(
            step,
            self.state.version,
            state,
            metrics,
            started,
            time.time(),
            samples=batch.sample_records(),
            fates=batch.fates,
            groups=[group.id for group in groups],
        )
        await self.store.add_event("info", "step", f"step {step}", {"step": step, "state": state, **metrics})
        if metrics.get("logprob_gap_mean", 0.0) > 1e-3:
            await self.store.add_event(
                "warning",
                "step",
                f"step {step}: log-probabilities of engine and trainer differ by {metrics['logprob_gap_mean']:.2g} "
                "on average (expected under 1e-3 in fp32)",
            )

    # evaluation and checkpoints

    async def _evaluate(self, why: str) -> None:
        if self.runtime.launcher is None:
            return  # nobody here can launch validation rollouts; those that others launch are recorded all the same
        await self.phases.set("evaluating", why)
        self.evaluation = Evaluation(self.store, self.runtime.launcher, self.recipe, self._val)
        run = asyncio.create_task(self.evaluation.run(step=self.state.step, version=self.state.version))
        try:
            while not run.done() and not self.stopping:
                await self._hold_if_wanted()
                self._wake.clear()
                waiter = asyncio.create_task(wait(self._wake, DISK_POLL_S))
                await asyncio.wait({run, waiter}, return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
            if not run.done():
                return
            result = run.result()
        finally:
            if not run.done():  # a stop, also one at once: it must not outlive this and write on
                run.cancel()
                await asyncio.wait({run})
            self.evaluation = None
        self.state.evaluated = self.state.step
        text = f"validation {result['mean']:.3f} ± {result['stderr']:.3f} on {result['n']} tasks ({why})"
        await self.store.add_event("info", "evaluation", text, {"step": self.state.step, **result})
        if self.phases.current == "evaluating":
            await self.phases.set("rollout")

    async def checkpoint(self, why: str) -> str:
        """Write a checkpoint of the current step; returns its folder. Old ones beyond `keep_last` and the best go."""
        kept = [row for row in self.store.checkpoints() if row["state"] == "kept"]
        # rather wait for room than lose the steps since the last one; they are all about as large
        need = folder_mb(self.runtime.run_dir.path / kept[-1]["path"]) if kept else 0
        await self._hold_if_wanted(need)
        name = f"step-{self.state.step}"
        path = self.runtime.run_dir.checkpoints / name
        self.state.open_groups = [*self.groups.open, *(group.id for group in self.groups.complete)]
        await self.runtime.worker.save(path, {"step": self.state.step, "loop": asdict(self.state)})
        self._checkpointed = self.state.step
        await self.store.add_checkpoint(
            self.state.step, self.state.version, str(path.relative_to(self.runtime.run_dir.path))
        )
        await self.store.add_event(
            "info", "checkpoint", f"{name} ({why})", {"step": self.state.step, "path": str(path)}
        )
        await self._prune()
        return str(path)

    async def _prune(self) -> None:
        kept = [row for row in self.store.checkpoints() if row["state"] == "kept"]
        kept.sort(key=lambda row: row["step"])
        scores = {row["step"]: row["result"]["mean"] for row in self.store.evaluations() if row["state"] == "done"}
        best = max((row["step"] for row in kept if row["step"] in scores), key=lambda step: scores[step], default=None)
        for row in kept[: -self.recipe.trainer.keep_last]:
            if row["step"] != best:
                await asyncio.to_thread(shutil.rmtree, self.runtime.run_dir.path / row["path"], True)
                await self.store.set_checkpoint_state(row["step"], "removed")

    async def restore(self, state: LoopState) -> None:
        """Go on from a checkpoint's state: its unfinished groups are taken up again."""
        self.state, self._checkpointed = state, state.step
        rows = {row["id"]: row for row in self.store.groups(split="train")}
        for group_id in state.open_groups:
            row = rows.get(group_id)
            if row is None or row["state"] == "dropped":
                continue
            task = self._tasks.get(("train", row["task_id"]))
            if task is None:
                raise AgliteError(
                    f"the run's task {row['task_id']} is no longer in {self.recipe.tasks.train}",
                    "put the tasks back as they were, or begin anew with --fresh",
                )
            await self.groups.restore(row, task)

    async def _hold_if_wanted(self, need_mb: int = 0) -> None:
        await self._pauses.hold(lambda: self.stopping, self.state.version, need_mb)
