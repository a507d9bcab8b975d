"""The training loop: keep groups in flight, train when enough are complete, evaluate and checkpoint in between."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from aglite.errors import AgliteError, DiskFullError
from aglite.evaluation import Evaluation
from aglite.phases import PhaseMachine
from aglite.runtime import Runtime
from aglite.training.groups import Groups, StepGroups
from aglite.training.keeping import tidy
from aglite.training.order import TaskOrder
from aglite.training.pauses import DISK_POLL_S, Pauses, folder_mb, free_mb, wait
from aglite.training.scores import best, comparable, enough
from aglite.training.state import LoopState
from aglite.training.step import Stepper


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
        self._val = val
        self._tasks = {row["id"]: row for row in train}
        self.order = TaskOrder(train, self.recipe.seed, self.recipe.tasks)
        self._stepper = Stepper(runtime, self.order)
        self._wake = asyncio.Event()
        self._pauses = Pauses(runtime, phases, self._wake)
        self.last_step: int | None = None
        """The step after which to stop, if somebody asked for that."""
        self._draining: asyncio.Task[bool] | None = None
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

    @property
    def hindered(self) -> str:
        """Why the run holds itself; '' when it does not, and when a person wants it held."""
        by_itself = self._pauses.held != self._pauses.asked or self.state.guard.tripped
        return self._pauses.held if by_itself else ""

    # what a person can ask for while it runs

    def stop(self) -> None:
        """End after what cannot be interrupted (an update); unfinished rollouts are taken up by the next start."""
        self.stopping = True
        self._notify()

    def stop_after_step(self) -> int:
        """End as `stop` does, but only when the next step is trained; returns its number."""
        self.last_step = self.state.step + 1
        return self.last_step

    def preempt(self) -> None:
        """Do not wait for a drain any longer. Raises AgliteError when there is none."""
        if self._draining is None:
            raise AgliteError(
                "nothing is being drained now", "it makes sense in the phase `draining` of a recipe with `close: drain`"
            )
        self._draining.cancel()

    def pause(self, why: str) -> None:
        self._pauses.asked = why
        self._notify()

    def resume(self) -> None:
        if self.state.guard.tripped:
            self.state.guard.forgive()
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

    @property
    def ended_early(self) -> str:
        """Why the run ends before its last step; '' when it does not."""
        return enough(comparable(self.store.evaluations()), self.recipe.evaluation.patience)

    async def run(self) -> None:
        """Train until the recipe's steps are done, evaluations get no better (`evaluation.patience`) or `stop` is
        called. Raises AgliteError when it cannot go on."""
        steps = self.recipe.trainer.steps
        if self.owes_evaluation:
            await self._evaluate(f"after step {self.state.step}" if self.state.step else "before training")
        if self.phases.current != "rollout" and not self.stopping:
            await self.phases.set("rollout")
        while self.state.step < steps and not self.stopping and not self.ended_early:
            started, before = time.monotonic(), self.state.step
            batch = await self._collect()
            if batch is None:
                continue
            await self._update(batch)
            made = self.state.step - before  # more than one where further groups were complete
            self._step_times += [(time.monotonic() - started) / made] * made
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

    async def _collect(self) -> StepGroups | None:
        """Wait for the groups of one step; None when something else has to be looked at first."""
        wanted = self.recipe.algorithm.groups_per_step
        while not self.stopping:
            self.groups.changed.clear()  # whatever changes from here on is looked at in the next round, without waiting
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
            if (taken := self.groups.take(wanted)) is not None:
                return taken
            await self._fill()  # in the place of groups that were set aside
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
            task = self.order.next(self.state)
            await self.groups.start(task, "train", algorithm.group_size, version=self.state.version)

    async def _update(self, taken: StepGroups) -> None:
        """Close the gate, train on `taken` (and on every further step's worth that is complete), reopen."""
        runtime = self.runtime
        await self.phases.set("draining", self.recipe.gateway.close)
        runtime.gateway.gate.close()
        if self.recipe.gateway.close == "drain":
            await self._drain()
        await runtime.worker.preempt()
        if runtime.worker.sleeps:
            await self.phases.set("sleeping")
            await runtime.worker.sleep()
        await self.phases.set("training", f"step {self.state.step + 1}")
        wanted = self.recipe.algorithm.groups_per_step
        await self._train_step(taken)
        while self.state.step < self.recipe.trainer.steps and not (self.stopping or self._pauses.asked):
            if (more := self.groups.take(wanted)) is None:
                break
            await self._train_step(more)
        await self.phases.set("syncing")
        await runtime.worker.resume(self.state.version)
        runtime.gateway.gate.open()
        await self.phases.set("rollout")

    async def _train_step(self, taken: StepGroups) -> None:
        await self._stepper.step(self.state, taken, self.groups.dropped)
        self._heed_guard()
        if self.last_step is not None and self.state.step >= self.last_step:
            self.stop()

    def _heed_guard(self) -> None:
        """Hold the run if the guard wants it held; after the last step there is nothing to hold."""
        if self.state.guard.tripped and self.state.step < self.recipe.trainer.steps:
            self.pause(self.state.guard.tripped)

    async def _drain(self) -> None:
        """Let what is in flight finish, up to a limit, or until `preempt` is called."""
        self._draining = asyncio.create_task(self.runtime.gateway.idle(self.recipe.gateway.drain_timeout_s))
        try:
            await asyncio.wait({self._draining})
        finally:
            self._draining.cancel()
            self._draining = None

    # evaluation and checkpoints

    async def _evaluate(self, why: str) -> None:
        if self.runtime.launcher is None:
            return  # nobody here can launch validation rollouts; those that others launch are recorded all the same
        await self.phases.set("evaluating", why)
        self.evaluation = Evaluation(self.store, self.runtime.launcher, self.recipe, self._val)
        run = asyncio.create_task(self.evaluation.run(step=self.state.step, version=self.state.version))
        try:
            while not run.done() and not self.stopping:
                self._wake.clear()
                await self._hold_if_wanted()
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
        await self._keep_if_best()
        await self._stepper.look_at(self.state, result, self._val[: self.recipe.evaluation.tasks])
        self._heed_guard()
        if self.phases.current == "evaluating":
            await self.phases.set("rollout")

    async def _keep_if_best(self) -> None:
        """See that the policy just evaluated has a checkpoint if it is the best so far; that of the last step and
        of a stop comes anyway, and step 0 is the model that the run began with."""
        step = self.state.step
        top = best(comparable(self.store.evaluations()))
        new = self._checkpointed < step < self.recipe.trainer.steps and not self.stopping
        if new and top is not None and top["step"] == step:
            await self.checkpoint(f"the best so far, {top['result']['mean']:.3f}")
        else:
            await self._tidy()

    async def checkpoint(self, why: str) -> str:
        """Write a checkpoint of the current step; returns its folder. Old ones beyond `keep_last` and the best go."""
        kept = [row for row in self.store.checkpoints() if row["state"] == "kept"]
        # rather wait for room than lose the steps since the last one; they are all about as large
        need = folder_mb(self.runtime.run_dir.path / kept[-1]["path"]) if kept else 0
        name = f"step-{self.state.step}"
        path = self.runtime.run_dir.checkpoints / name
        while True:
            await self._hold_if_wanted(need)
            waiting = (*self.groups.set_aside, *self.groups.complete)
            self.state.open_groups = [*self.groups.open, *(group.id for group in waiting)]
            try:
                await self.runtime.worker.save(path, {"step": self.state.step, "loop": asdict(self.state)})
                break
            except DiskFullError:
                if self.stopping:
                    raise
                need = free_mb(self.runtime.run_dir.path) + 1  # with what there is it has just failed
        self._checkpointed = self.state.step
        await self.store.add_checkpoint(
            self.state.step, self.state.version, str(path.relative_to(self.runtime.run_dir.path))
        )
        await self.store.add_event(
            "info", "checkpoint", f"{name} ({why})", {"step": self.state.step, "path": str(path)}
        )
        await self._tidy()
        return str(path)

    async def _tidy(self) -> None:
        await tidy(self.store, self.runtime.run_dir.path, self.recipe.trainer.keep_last)

    async def restore(self, state: LoopState) -> None:
        """Go on from a checkpoint's state: its unfinished groups are taken up, what the guard held is held."""
        self.state, self._checkpointed = state, state.step
        self._pauses.asked = state.guard.tripped
        rows = {row["id"]: row for row in self.store.groups(split="train")}
        for group_id in state.open_groups:
            row = rows.get(group_id)
            if row is None or row["state"] == "dropped":
                continue
            task = self._tasks.get(row["task_id"])
            if task is None:
                raise AgliteError(
                    f"the run's task {row['task_id']} is no longer in {self.recipe.tasks.train}",
                    "put the tasks back as they were, or begin anew with --fresh",
                )
            await self.groups.restore(row, task)

    async def _hold_if_wanted(self, need_mb: int = 0) -> None:
        await self._pauses.hold(lambda: self.stopping, self.state.version, need_mb)
