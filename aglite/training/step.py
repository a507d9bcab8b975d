"""One training step: complete groups in, a weight update and everything that is recorded of it out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from aglite.errors import EngineError
from aglite.runtime import Runtime
from aglite.training.advantage import update_baseline
from aglite.training.batch import Batch, build_batch
from aglite.training.groups import Group, StepGroups
from aglite.training.guard import watch, watch_evaluation
from aglite.training.order import TaskOrder
from aglite.training.schedule import learning_rate
from aglite.training.state import LoopState

CUT = 0.2
"""Share of importance weights that may be cut before it is worth a warning."""


class Stepper:
    """Makes the steps of a run on a started Runtime, and keeps an eye on them."""

    def __init__(self, runtime: Runtime, order: TaskOrder) -> None:
        self._runtime = runtime
        self._recipe = runtime.recipe
        self._store = runtime.store
        self._order = order

    async def step(self, state: LoopState, taken: StepGroups, dropped: int) -> None:
        """Train on `taken`; `state` then is that after the step. `dropped`: groups that the run has lost so far."""
        started = time.time()
        number = state.step + 1
        batch = await asyncio.to_thread(self._build, state, taken)
        result: dict[str, Any] = {"applied": False, "seconds": 0.0}
        if batch.message is not None:
            self._runtime.progress = {}
            result = await self._runtime.worker.train(batch.message)
            _check_counts(batch, result)
        if result["applied"]:
            state.version = self._store.next_version()
        elif batch.message is not None:
            await self._store.add_event(
                "error", "step", f"step {number}: loss or gradient was not finite; the update is not applied"
            )
        rewards = [reward for group in taken.trained for reward in group.rewards()]
        state.baseline = update_baseline(state.baseline, rewards)
        metrics = self._metrics(state, taken, batch, result) | {"groups_dropped": dropped}
        resting = self._rest(state, taken.all)
        metrics["tasks_resting"] = len(self._order.resting(state))
        if self._recipe.tasks.rest_solved_after or self._recipe.tasks.rest_unsolved_after:
            await self._store.set_meta("resting", self._order.resting(state))
        finite = None if batch.message is None else not result.get("skipped", not result["applied"])
        kinds = _by_kind(taken.all)
        metrics["reward_by_kind"] = {kind: fmean(values) for kind, values in sorted(kinds.items()) if kind}
        alarms = self._watch(state, metrics, kinds, finite)
        await self._record(number, state, taken, batch, metrics, result, started)
        state.step = number
        for text in resting:
            await self._store.add_event("info", "run", text)
        await self._warn(number, metrics)
        for alarm in alarms:
            await self._store.add_event("error", "run", f"step {number}: {alarm}", {"step": number})

    def _build(self, state: LoopState, taken: StepGroups) -> Batch:
        return build_batch(
            [group.graded() for group in taken.trained],
            self._store.calls,
            self._recipe,
            version=state.version,
            baseline=state.baseline,
            lr=self._learning_rate(state),
            set_aside=[group.graded() for group in taken.set_aside],
        )

    def _learning_rate(self, state: LoopState) -> float:
        trainer = self._recipe.trainer
        return learning_rate(
            trainer.lr,
            state.step,
            steps=trainer.steps,
            warmup_steps=trainer.warmup_steps,
            schedule=trainer.lr_schedule,
        )

    def _metrics(self, state: LoopState, taken: StepGroups, batch: Batch, result: dict[str, Any]) -> dict[str, Any]:
        computed = {key: value for key, value in result.items() if key not in ("applied", "trained_tokens", "tokens")}
        members = [member for group in taken.all for member in group.members]
        return {
            **batch.metrics,
            **computed,
            "lr": self._learning_rate(state),
            "causes": self._store.counts_by_cause(members),
        }

    async def _record(
        self,
        number: int,
        state: LoopState,
        taken: StepGroups,
        batch: Batch,
        metrics: dict[str, Any],
        result: dict[str, Any],
        started: float,
    ) -> None:
        what = "applied" if result["applied"] else "skipped"
        await self._store.add_step(
            number,
            state.version,
            what,
            metrics,
            started,
            time.time(),
            samples=batch.sample_records(),
            fates=batch.fates,
            groups=[group.id for group in taken.all],
        )
        await self._store.add_event("info", "step", f"step {number}", {"step": number, "state": what, **metrics})

    def _rest(self, state: LoopState, groups: Sequence[Group]) -> list[str]:
        """Take note of how tasks went; one sentence for each that rests from now on."""
        found = []
        for group in groups:
            if group.rewards() and (why := self._order.note(state, group.task_id, group.rewards())):
                epochs = self._recipe.tasks.rest_epochs
                found.append(f"task {group.task_id} rests for {epochs} passes over the tasks: {why}")
        return found

    def _watch(
        self, state: LoopState, metrics: dict[str, Any], kinds: dict[str, list[float]], finite: bool | None
    ) -> list[str]:
        """What runs away, if anything; the run is to be held for it where the recipe says so."""
        guard = self._recipe.guard
        if guard.action == "off":
            return []
        return self._trip(state, watch(state.guard, guard, metrics, kinds, finite=finite))

    async def look_at(self, state: LoopState, result: dict[str, Any], tasks: Sequence[dict[str, Any]]) -> None:
        """Let the guard see the result of an evaluation on `tasks`."""
        if self._recipe.guard.action == "off":
            return
        sizes = Counter(str(task["public"]["kind"]) for task in tasks if "kind" in task["public"])
        rewards = {kind: (mean, sizes[kind]) for kind, mean in result["by_kind"].items()}
        rewards[""] = (result["mean"], result["n"])
        for alarm in self._trip(state, watch_evaluation(state.guard, self._recipe.guard, rewards)):
            await self._store.add_event("error", "run", alarm, {"step": state.step})

    def _trip(self, state: LoopState, alarms: list[str]) -> list[str]:
        """Hold the run for `alarms`, if there are any and the recipe says so."""
        if alarms:
            state.guard.forgive()  # each is said once; what follows is compared with what is now
            if self._recipe.guard.action == "pause":
                state.guard.tripped = "; ".join([*alarms, *self._ways_on()])
        return alarms

    def _ways_on(self) -> list[str]:
        """What somebody can do with a run that is held."""
        folder = self._runtime.run_dir.path
        kept = [str(folder / row["path"]) for row in self._store.checkpoints() if row["state"] == "kept"]
        ways = ["`aglite resume` goes on all the same"]
        return [*ways, f"to begin another run from here: --set model={' or '.join(kept)}"] if kept else ways

    async def _warn(self, number: int, metrics: dict[str, Any]) -> None:
        """Say where the engine and the trainer, or the weights that sampled and those that are trained, drift apart."""
        gap, expected = metrics.get("logprob_gap_mean", 0.0), self._runtime.worker.tolerance
        if gap > expected:
            await self._store.add_event(
                "warning",
                "step",
                f"step {number}: log-probabilities of engine and trainer differ by {gap:.2g} on average (expected "
                f"under {expected:g})",
            )
        kl, cut, limit = (
            metrics.get("kl_rollout", 0.0),
            metrics.get("correction_capped", 0.0),
            self._recipe.guard.mismatch,
        )
        if limit and (kl > limit or cut > CUT):
            await self._store.add_event(
                "warning",
                "step",
                f"step {number}: its tokens were sampled by another policy than the one it trains: KL {kl:.2g} nats a "
                f"token, largest ratio {metrics.get('ratio_max', 0.0):.3g}, {cut:.0%} of the importance weights cut; "
                "lower trainer.lr, algorithm.groups_in_flight or algorithm.max_staleness, or set algorithm.rollout_rs",
            )


def _by_kind(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Mean rewards of groups by the public field `kind` of their tasks, and of all of them under ''."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        if rewards := group.rewards():
            for kind in {"", str(group.task["public"].get("kind", ""))}:
                kinds[kind].append(fmean(rewards))
    return kinds


def _check_counts(batch: Batch, result: dict[str, Any]) -> None:
    """Every trained token of the batch went through the model. Raises EngineError if not."""
    wanted = batch.metrics["ledger"]["computed"]
    if result["trained_tokens"] != wanted:
        raise EngineError(
            f"the model worker trained {result['trained_tokens']} tokens of {wanted} that it was given",
            "start the run again with the same aglite on both sides",
        )
