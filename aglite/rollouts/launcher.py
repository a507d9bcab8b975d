"""The launcher: from a queued rollout to its outcome. See `Launcher`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aglite.config import Recipe
from aglite.paths import RunDir
from aglite.rollouts.attempt import Attempts, Rollout
from aglite.rollouts.backends.choose import check_backend, make_backend
from aglite.rollouts.breaker import Breaker
from aglite.rollouts.causes import Cause
from aglite.rollouts.environment import check_agent
from aglite.rollouts.grading import Grader
from aglite.rollouts.judging import Judging
from aglite.rollouts.outcome import STATE_OF, Ended, Outcome
from aglite.rollouts.reaper import Reaper
from aglite.rollouts.slots import Slots

if TYPE_CHECKING:
    from aglite.gateway.gateway import Gateway
    from aglite.rollouts.backends.sidecars import Serve
    from aglite.store import Store

log = logging.getLogger("aglite.rollouts")

BACKOFF_S = 2.0
"""Wait before the second attempt; four times as long before each further one."""


class Launcher:
    """Runs agents, at most `agent.concurrency` at once, oldest submission first, and grades what they leave.

    Every change of state is in the store before the next step is taken, and then told to `on_change` as
    `{"id", "state", "cause", "attempt", "reward"}`. Failures of the infrastructure are tried again (`agent.attempts`,
    with growing waits); the agent's own are its result. When an attempt is over, nothing of it runs any more.
    """

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        recipe: Recipe,
        run_dir: RunDir,
        base_url: Callable[[], str],
        on_change: Callable[[dict[str, Any]], None] | None = None,
        *,
        serve: Serve | None = None,
        reaper: Reaper | None = None,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """`serve` lets the gateway answer on a further socket; containers need it. `reaper`: one that runs already and
        is somebody else's to stop; by default the launcher has its own."""
        self._store = store
        self._recipe = recipe
        self._run_dir = run_dir
        self._on_change = on_change
        self._backoff_s = backoff_s
        self._owns_reaper = reaper is None
        self._reaper = reaper or Reaper(run_dir.path)
        self._slots = Slots(recipe.agent.concurrency)
        self._breaker = Breaker(self._slots, 2 * backoff_s, self._on_breaker)
        self._events: set[asyncio.Task[int]] = set()
        self._backend = make_backend(recipe, run_dir, self._reaper, serve)
        self._judging = Judging(recipe, run_dir, store, self._reaper, self._backend)
        self._attempts = Attempts(
            recipe, run_dir, gateway, base_url, self._backend, self._judging, self._breaker, self._change
        )
        self.sandbox: Mapping[str, Any] = {}
        """What the backend says of the place that it starts agents in; `exposed`: what it does not protect from."""
        self._rollouts: dict[str, Rollout] = {}
        self._orders = itertools.count()
        self._stopping = False

    async def start(self) -> None:
        """Check the recipe, delete what an earlier supervisor of this run left, and be ready.

        Raises RecipeError if the agent or the grader cannot work. Hold the run directory's lock.
        """
        self._run_dir.create()
        if self._owns_reaper:
            await self._reaper.start()
        self.sandbox = await self._backend.open()
        if self.sandbox:
            await self._store.set_meta("sandbox", self.sandbox)
        await self._judging.start()
        await check_recipe(self._recipe, self._run_dir, self._reaper)

    async def stop(self) -> None:
        """Cancel every rollout, end its processes and see that nothing is left. Stopping twice is fine."""
        self._stopping = True
        self._breaker.stop()
        rollouts = list(self._rollouts.values())
        for rollout in rollouts:
            self._cancel(rollout, Cause("stopped"))
        if rollouts:
            await asyncio.wait({rollout.work for rollout in rollouts})
        if self._events:
            await asyncio.wait(self._events)
        left = await self._backend.sweep()
        if left:
            log.warning("ended %d agents that their rollouts had left", len(left))
        await self._backend.close()
        await self._judging.stop()
        if self._owns_reaper:
            await self._reaper.stop()

    def submit(
        self, rollout_id: str, task: Mapping[str, Any], split: str, seed: int | None = None
    ) -> asyncio.Task[Outcome]:
        """Queue a rollout that is in the store. `task` is the whole row; `seed` makes its sampling repeatable.

        The task gives the outcome; it raises only when the store cannot be written or a process cannot be ended.
        Cancelling it kills the rollout.
        """
        if rollout_id in self._rollouts:
            raise ValueError(f"rollout {rollout_id} is launched already")
        stop = asyncio.get_running_loop().create_future()
        rollout = Rollout(rollout_id, task, split, seed, next(self._orders), stop, self._slots)
        self._rollouts[rollout_id] = rollout
        if self._stopping:
            self._cancel(rollout, Cause("stopped"))
        rollout.work = asyncio.create_task(self._run(rollout), name=f"rollout {rollout_id}")
        return asyncio.create_task(self._follow(rollout))

    def kill(self, rollout_id: str, cause: str = "killed") -> bool:
        """Cancel one rollout; False if it is not here (any more)."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return False
        self._cancel(rollout, Cause(cause))
        return True

    @property
    def concurrency(self) -> int:
        """How many rollouts run at once. A smaller number ends nothing: those that run go on to their end."""
        return self._slots.size

    @concurrency.setter
    def concurrency(self, number: int) -> None:
        self._slots.resize(number)

    def pause(self) -> None:
        """Start nothing new until `resume`."""
        self._slots.pause()

    def resume(self) -> None:
        self._slots.resume()

    @property
    def blocked(self) -> str:
        """Why nothing is launched at the moment though nobody paused it; '' when that is not so."""
        return self._breaker.text

    def counts(self) -> dict[str, int]:
        """Unfinished rollouts by state: queued, starting, running, grading."""
        counts = Counter(rollout.stage for rollout in self._rollouts.values())
        return {stage: counts[stage] for stage in ("queued", "starting", "running", "grading")}

    @property
    def running(self) -> list[str]:
        """Ids of the rollouts that have a process or are about to: starting, running or grading."""
        return [rollout.id for rollout in self._rollouts.values() if rollout.stage != "queued"]

    def sandboxes(self) -> list[dict[str, Any]]:
        """What runs where: `{"rollout_id", "task_id", "split", "state", "attempt", "begun", "pid", "container",
        "workdir"}` of each attempt under way, the oldest first. `pid` or `container` is null where it has none."""
        return [
            {
                "rollout_id": rollout.id,
                "task_id": str(rollout.task["id"]),
                "split": rollout.split,
                "state": rollout.stage,
                "attempt": rollout.attempt,
                "begun": rollout.begun,
                "pid": getattr(rollout.running, "pid", None),
                "container": getattr(rollout.running, "container", None),
                "workdir": str(rollout.running.workdir) if rollout.running else None,
            }
            for rollout in sorted(self._rollouts.values(), key=lambda each: each.begun)
            if rollout.stage != "queued"
        ]

    # one rollout

    async def _follow(self, rollout: Rollout) -> Outcome:
        try:
            return await asyncio.shield(rollout.work)
        except asyncio.CancelledError:
            self._cancel(rollout, Cause("killed"))
            raise

    def _cancel(self, rollout: Rollout, cause: Cause) -> None:
        if not rollout.stop.done():
            rollout.stop.set_result(cause)

    async def _run(self, rollout: Rollout) -> Outcome:
        try:
            number = self._store.rollout(rollout.id)["attempt"]
            failures = 0
            while True:
                if not await rollout.take_slot():
                    return await self._finish(rollout, number, Ended(rollout.stop.result()))
                number += 1
                self._breaker.begin(rollout)
                try:
                    ended = await self._attempts.run(rollout, number)
                finally:
                    rollout.give_slot()
                excused = self._breaker.ended(rollout, str(rollout.task["id"]), ended.cause)
                failures += not excused
                final = ended.cause is None or not ended.cause.retryable or failures == self._recipe.agent.attempts
                if final and not excused:
                    return await self._finish(rollout, number, ended)
                await self._change(rollout, "queued", number, ended.cause, exit_code=ended.exit_code)
                if not excused:
                    await asyncio.wait({rollout.stop}, timeout=self._backoff_s * 4 ** (failures - 1))
        finally:
            del self._rollouts[rollout.id]

    # the store

    def _on_breaker(self, is_open: bool, text: str) -> None:
        event = asyncio.create_task(self._store.add_event("warning" if is_open else "info", "run", text))
        self._events.add(event)
        event.add_done_callback(self._events.discard)

    async def _finish(self, rollout: Rollout, number: int, ended: Ended) -> Outcome:
        state = STATE_OF[ended.cause.kind] if ended.cause else "done"
        grade = ended.grade if state in ("done", "failed") else None
        reward, breakdown = (grade.reward, grade.breakdown) if grade else (None, {})
        await self._change(
            rollout,
            state,
            number,
            ended.cause,
            exit_code=ended.exit_code,
            reward=reward,
            breakdown=breakdown,
            flags=ended.flags,
        )
        return Outcome(state, str(ended.cause or ""), reward, breakdown, ended.flags, number)

    async def _change(
        self, rollout: Rollout, state: str, number: int, cause: Cause | None = None, **columns: Any
    ) -> None:
        await self._store.set_rollout_state(rollout.id, state, str(cause or ""), number, **columns)
        rollout.stage = state
        if self._on_change:
            self._on_change(
                {
                    "id": rollout.id,
                    "state": state,
                    "cause": str(cause or ""),
                    "attempt": number,
                    "reward": columns.get("reward"),
                }
            )


async def check_recipe(recipe: Recipe, run_dir: RunDir, reaper: Reaper) -> None:
    """Raise RecipeError if the recipe's agent or grader cannot work: a missing file, a grader that does not load.

    `Launcher.start` does it too; before the model is loaded, it saves the wait.
    """
    check_agent(recipe)
    await check_backend(recipe)
    if recipe.reward and recipe.reward.judge:
        from aglite.rollouts.judge import check_key

        check_key(recipe.reward.judge)
    await Grader(recipe, reaper).check(run_dir.logs / "grader.log")
