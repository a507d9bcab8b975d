"""One attempt of a rollout, from its session at the gateway to its grade. See `Attempts`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.paths import RunDir
from aglite.rollouts.backends import Backend, Launch, Running
from aglite.rollouts.breaker import Breaker
from aglite.rollouts.causes import BackendError, Cause
from aglite.rollouts.environment import make_launch
from aglite.rollouts.grading import Grade
from aglite.rollouts.judging import Judging
from aglite.rollouts.outcome import Ended, Outcome, cause_of, flags_of
from aglite.rollouts.slots import Slots

if TYPE_CHECKING:
    from aglite.gateway.gateway import Gateway
    from aglite.gateway.sessions import Session

TIME_UP_GRACE_S = 2.0
"""What an agent gets between SIGTERM and SIGKILL when its time is up, to write down what it has."""


@dataclass(slots=True, eq=False)
class Rollout:
    """A rollout that the launcher has: what was submitted, and where it stands."""

    id: str
    task: Mapping[str, Any]
    split: str
    seed: int | None
    order: int
    """Of submission; decides who is next."""
    stop: asyncio.Future[Cause]
    """Done when it is to end without a result, with the cause of that."""
    slots: Slots
    stage: str = "queued"
    has_slot: bool = False
    attempt: int = 0
    begun: float = 0.0
    """When the current attempt began, in Unix seconds."""
    running: Running | None = None
    work: asyncio.Task[Outcome] = field(init=False)

    async def take_slot(self) -> bool:
        """Wait for a slot; False, without one, if `stop` is done first."""
        self.has_slot = await self.slots.take(self.order, self.stop)
        return self.has_slot

    def give_slot(self) -> None:
        if self.has_slot:
            self.has_slot = False
            self.slots.give()


class Change(Protocol):
    """Writes a change of state into the store, and tells of it."""

    async def __call__(
        self, rollout: Rollout, state: str, number: int, cause: Cause | None = None, **columns: Any
    ) -> None: ...


class Attempts:
    """Runs attempts: opens a session, starts the agent, watches it, ends it and all it started, has it graded."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDir,
        gateway: Gateway,
        base_url: Callable[[], str],
        backend: Backend,
        judging: Judging,
        breaker: Breaker,
        change: Change,
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._gateway = gateway
        self._base_url = base_url
        self._backend = backend
        self._judging = judging
        self._breaker = breaker
        self._change = change
        self._keeps_text = recipe.retention.traffic == "all"
        self._gradings = Slots(max(2, os.cpu_count() or 1))

    async def run(self, rollout: Rollout, number: int) -> Ended:
        """Attempt `number`, in the slot that the rollout has; the slot is given back when its agent is to be graded.

        When it is over, nothing of the attempt runs any more. Raises only when the store cannot be written or a
        process cannot be ended."""
        session = self._gateway.open_session(
            rollout.id,
            number,
            self._recipe.agent.limits,
            self._recipe.sampling.val if rollout.split == "val" else self._recipe.sampling.train,
            seed=rollout.seed,
        )
        running: Running | None = None
        rollout.attempt, rollout.begun = number, time.time()
        try:
            await self._change(rollout, "starting", number, token_hash=session.token_hash)
            try:
                launch = make_launch(
                    self._recipe,
                    rollout.task,
                    rollout_id=rollout.id,
                    attempt=number,
                    url=(self._backend.base_url or self._base_url()) + session.path,
                    token=session.token,
                    model=self._gateway.model_name,
                    context_length=self._gateway.context_length,
                    log=self._run_dir.rollout_log(rollout.id, number),
                )
                running = rollout.running = await self._start(rollout, launch)
            except RecipeError as error:
                return Ended(Cause("recipe", f"{error.message} ({error.mend})"))
            except BackendError as error:
                return Ended(error.cause)
            except OSError as error:
                return Ended(Cause("launch", str(error)))
            if running is None:
                return Ended(rollout.stop.result())
            self._breaker.started(rollout)
            await self._change(rollout, "running", number)
            out_of_time = await self._watch(rollout, running, session)
            try:
                stragglers = await running.stop(TIME_UP_GRACE_S if out_of_time else 0.0)
            except BackendError as error:
                return Ended(rollout.stop.result() if rollout.stop.done() else error.cause)
            await self._gateway.close_session(rollout.id)
            if rollout.stop.done():
                return Ended(rollout.stop.result())
            ended = self._assess(running, session, out_of_time, bool(stragglers))
            return await self._judge(rollout, number, running, ended)
        finally:
            await self._gateway.close_session(rollout.id)
            rollout.running = None
            if running is not None:
                await running.stop()
                await running.remove()

    async def _start(self, rollout: Rollout, launch: Launch) -> Running | None:
        """Let the backend start an attempt, which may take it minutes; None if the rollout was stopped meanwhile."""
        starting = asyncio.ensure_future(self._backend.start(launch))
        await asyncio.wait({starting, rollout.stop}, return_when=asyncio.FIRST_COMPLETED)
        if self._backend.starts_slowly and not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return None if starting.cancelled() else starting.result()
        return await starting

    async def _watch(self, rollout: Rollout, running: Running, session: Session) -> bool:
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

    def _assess(self, running: Running, session: Session, out_of_time: bool, stragglers: bool) -> Ended:
        exit = running.exited.result()
        limits_hit = sorted({*session.limits_hit, *(["wall_s"] if out_of_time else [])})
        cause = cause_of(
            exit,
            limits=self._recipe.agent.limits,
            out_of_time=out_of_time,
            limits_hit=limits_hit,
            infra_error=session.infra_error,
            last_line=running.last_line,
            quote=self._keeps_text,
        )
        flags = flags_of(
            calls=session.calls,
            limits_hit=limits_hit,
            log_cut=self._keeps_text and running.left_out > 0,
            stragglers=stragglers,
        )
        return Ended(cause, exit.code, [*flags, *running.flags], limits_hit)

    async def _judge(self, rollout: Rollout, number: int, running: Running, ended: Ended) -> Ended:
        if ended.cause and ended.cause.kind != "policy":
            return ended
        if ended.cause and self._judging.skips_failures:
            ended.grade = Grade(0.0)
            return ended
        await self._change(rollout, "grading", number, ended.cause, exit_code=ended.exit_code, flags=ended.flags)
        if not await self._gradings.take(rollout.order, rollout.stop):
            return Ended(rollout.stop.result(), ended.exit_code, ended.flags)
        # Only now, so that a slow grader holds new agents back instead of piling up what they left.
        rollout.give_slot()
        try:
            await self._judging.judge(
                rollout.id, number, rollout.task, rollout.split, running.workdir, ended, rollout.stop
            )
        finally:
            self._gradings.give()
        if rollout.stop.done():
            return Ended(rollout.stop.result(), ended.exit_code, ended.flags)
        return ended
