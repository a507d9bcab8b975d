"""The launcher: from a queued rollout to its outcome. See `Launcher`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.paths import RunDir
from aglite.rollouts.backends import Backend, Running
from aglite.rollouts.backends.local import LocalBackend
from aglite.rollouts.causes import Cause
from aglite.rollouts.environment import check_agent, make_launch
from aglite.rollouts.grading import Grade, Grader, GraderError, conversations
from aglite.rollouts.outcome import STATE_OF, Outcome, cause_of, flags_of
from aglite.rollouts.reaper import Reaper
from aglite.rollouts.slots import Slots

if TYPE_CHECKING:
    from aglite.gateway.gateway import Gateway
    from aglite.gateway.sessions import Session
    from aglite.store import Store

log = logging.getLogger("aglite.rollouts")

BACKOFF_S = 2.0
"""Wait before the second attempt; four times as long before each further one."""

TIME_UP_GRACE_S = 2.0
"""What an agent gets between SIGTERM and SIGKILL when its time is up, to write down what it has."""


@dataclass(slots=True, eq=False)
class _Rollout:
    id: str
    task: Mapping[str, Any]
    split: str
    seed: int | None
    order: int
    stop: asyncio.Future[Cause]
    stage: str = "queued"
    has_slot: bool = False
    work: asyncio.Task[Outcome] = field(init=False)


@dataclass(slots=True)
class _Ended:
    """How one attempt ended."""

    cause: Cause | None = None
    exit_code: int | None = None
    flags: list[str] = field(default_factory=list)
    limits_hit: list[str] = field(default_factory=list)
    grade: Grade | None = None


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
        reaper: Reaper | None = None,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """`reaper`: one that runs already and is somebody else's to stop; by default the launcher has its own."""
        self._store = store
        self._gateway = gateway
        self._recipe = recipe
        self._run_dir = run_dir
        self._base_url = base_url
        self._on_change = on_change
        self._backoff_s = backoff_s
        self._owns_reaper = reaper is None
        self._reaper = reaper or Reaper(run_dir.path)
        concurrency = recipe.agent.concurrency
        self._slots = Slots(concurrency)
        self._gradings = Slots(max(2, os.cpu_count() or 1))
        self._backend: Backend = LocalBackend(run_dir, self._reaper, concurrency)
        self._grader = Grader(recipe, self._reaper)
        self._rollouts: dict[str, _Rollout] = {}
        self._orders = itertools.count()
        self._stopping = False

    async def start(self) -> None:
        """Check the recipe, delete what an earlier supervisor of this run left, and be ready.

        Raises RecipeError if the agent or the grader cannot work. Hold the run directory's lock.
        """
        self._run_dir.create()
        if self._owns_reaper:
            await self._reaper.start()
        await self._backend.sweep()
        await check_recipe(self._recipe, self._run_dir, self._reaper)

    async def stop(self) -> None:
        """Cancel every rollout, end its processes and see that nothing is left. Stopping twice is fine."""
        self._stopping = True
        rollouts = list(self._rollouts.values())
        for rollout in rollouts:
            self._cancel(rollout, Cause("stopped"))
        if rollouts:
            await asyncio.wait({rollout.work for rollout in rollouts})
        left = await self._backend.sweep()
        if left:
            log.warning("ended %d processes that their rollouts had left", len(left))
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
        rollout = _Rollout(rollout_id, task, split, seed, next(self._orders), stop)
        self._rollouts[rollout_id] = rollout
        if self._stopping:
            self._cancel(rollout, Cause("stopped"))
        rollout.work = asyncio.create_task(self._run(rollout), name=f"rollout {rollout_id}")
        return asyncio.create_task(self._follow(rollout))

    def kill(self, rollout_id: str) -> bool:
        """Cancel one rollout; False if it is not here (any more)."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return False
        self._cancel(rollout, Cause("killed"))
        return True

    def pause(self) -> None:
        """Start nothing new until `resume`."""
        self._slots.pause()

    def resume(self) -> None:
        self._slots.resume()

    def counts(self) -> dict[str, int]:
        """Unfinished rollouts by state: queued, starting, running, grading."""
        counts = Counter(rollout.stage for rollout in self._rollouts.values())
        return {stage: counts[stage] for stage in ("queued", "starting", "running", "grading")}

    @property
    def running(self) -> list[str]:
        """Ids of the rollouts that have a process or are about to: starting, running or grading."""
        return [rollout.id for rollout in self._rollouts.values() if rollout.stage != "queued"]

    # one rollout

    async def _follow(self, rollout: _Rollout) -> Outcome:
        try:
            return await asyncio.shield(rollout.work)
        except asyncio.CancelledError:
            self._cancel(rollout, Cause("killed"))
            raise

    def _cancel(self, rollout: _Rollout, cause: Cause) -> None:
        if not rollout.stop.done():
            rollout.stop.set_result(cause)

    async def _run(self, rollout: _Rollout) -> Outcome:
        try:
            number = self._store.rollout(rollout.id)["attempt"]
            last = number + self._recipe.agent.attempts
            wait_s = self._backoff_s
            while True:
                if not await self._slots.take(rollout.order, rollout.stop):
                    return await self._finish(rollout, number, _Ended(rollout.stop.result()))
                rollout.has_slot = True
                number += 1
                try:
                    ended = await self._attempt(rollout, number)
                finally:
                    self._give_slot(rollout)
                if ended.cause is None or not ended.cause.retryable or number == last:
                    return await self._finish(rollout, number, ended)
                await self._change(rollout, "queued", number, ended.cause, exit_code=ended.exit_code)
                await asyncio.wait({rollout.stop}, timeout=wait_s)
                wait_s *= 4
        finally:
            del self._rollouts[rollout.id]

    def _give_slot(self, rollout: _Rollout) -> None:
        if rollout.has_slot:
            rollout.has_slot = False
            self._slots.give()

    async def _attempt(self, rollout: _Rollout, number: int) -> _Ended:
        session = self._gateway.open_session(
            rollout.id,
            number,
            self._recipe.agent.limits,
            self._recipe.sampling.val if rollout.split == "val" else self._recipe.sampling.train,
            seed=rollout.seed,
        )
        running: Running | None = None
        try:
            await self._change(rollout, "starting", number, token_hash=session.token_hash)
            try:
                launch = make_launch(
                    self._recipe,
                    rollout.task,
                    rollout_id=rollout.id,
                    attempt=number,
                    url=self._base_url() + session.path,
                    token=session.token,
                    model=self._gateway.model_name,
                    log=self._run_dir.rollout_log(rollout.id, number),
                )
                running = await self._backend.start(launch)
            except RecipeError as error:
                return _Ended(Cause("recipe", f"{error.message} ({error.mend})"))
            except OSError as error:
                return _Ended(Cause("launch", str(error)))
            await self._change(rollout, "running", number)
            out_of_time = await self._watch(rollout, running, session)
            stragglers = await running.stop(TIME_UP_GRACE_S if out_of_time else 0.0)
            await self._gateway.close_session(rollout.id)
            if rollout.stop.done():
                return _Ended(rollout.stop.result())
            ended = self._assess(running, session, out_of_time, bool(stragglers))
            return await self._judge(rollout, number, running, ended)
        finally:
            await self._gateway.close_session(rollout.id)
            if running is not None:
                await running.stop()
                await running.remove()

    async def _watch(self, rollout: _Rollout, running: Running, session: Session) -> bool:
        """Wait until the agent has ended, is to be stopped, or its time is up; True for the last.

        The time that the gateway held its requests is not the agent's, and it grows while we wait.
        """
        begun = time.monotonic()
        while True:
            left = self._recipe.agent.limits.wall_s + session.held_s - (time.monotonic() - begun)
            if left <= 0:
                return True
            await asyncio.wait(
                {running.exited, rollout.stop}, timeout=max(left, 0.1), return_when=asyncio.FIRST_COMPLETED
            )
            if running.exited.done() or rollout.stop.done():
                return False

    def _assess(self, running: Running, session: Session, out_of_time: bool, stragglers: bool) -> _Ended:
        exit = running.exited.result()
        limits_hit = sorted({*session.limits_hit, *(["wall_s"] if out_of_time else [])})
        cause = cause_of(
            exit,
            limits=self._recipe.agent.limits,
            out_of_time=out_of_time,
            limits_hit=limits_hit,
            infra_error=session.infra_error,
            last_line=running.last_line,
        )
        flags = flags_of(
            calls=session.calls, limits_hit=limits_hit, log_cut=running.left_out > 0, stragglers=stragglers
        )
        return _Ended(cause, exit.code, flags, limits_hit)

    # grading

    async def _judge(self, rollout: _Rollout, number: int, running: Running, ended: _Ended) -> _Ended:
        if ended.cause and ended.cause.kind != "policy":
            return ended
        if ended.cause and self._grader.skips_failures:
            ended.grade = Grade(0.0)
            return ended
        await self._change(rollout, "grading", number, ended.cause, exit_code=ended.exit_code, flags=ended.flags)
        if not await self._gradings.take(rollout.order, rollout.stop):
            return _Ended(rollout.stop.result(), ended.exit_code, ended.flags)
        # Only now, so that a slow grader holds new agents back instead of piling up what they left.
        self._give_slot(rollout)
        try:
            facts = {
                "id": rollout.id,
                "attempt": number,
                "split": rollout.split,
                "exit_code": ended.exit_code,
                "cause": str(ended.cause or ""),
                "limits_hit": ended.limits_hit,
                "flags": ended.flags,
                **await asyncio.to_thread(conversations, self._store, rollout.id, number),
            }
            path = self._run_dir.rollout_log(rollout.id, number)
            ended.grade = await self._grader.grade(rollout.task, facts, running.workdir, log=path, stop=rollout.stop)
        except GraderError as error:
            if ended.cause and error.raised:
                # The agent failed and left nothing that the grader could make sense of.
                ended.grade = Grade(0.0)
                ended.flags.append("ungraded")
            else:
                ended.cause = Cause("grader", str(error))
        finally:
            self._gradings.give()
        if rollout.stop.done():
            return _Ended(rollout.stop.result(), ended.exit_code, ended.flags)
        return ended

    # the store

    async def _finish(self, rollout: _Rollout, number: int, ended: _Ended) -> Outcome:
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
        self, rollout: _Rollout, state: str, number: int, cause: Cause | None = None, **columns: Any
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
    await Grader(recipe, reaper).check(run_dir.logs / "grader.log")
