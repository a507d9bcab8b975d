"""The one process of a run: it holds the directory, serves the control API, runs the work and cleans up after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from aglite.config import Recipe
from aglite.control import create_control_app
from aglite.echo import echo
from aglite.engine.child import HEARTBEAT_TIMEOUT_S, ChildExit
from aglite.errors import AgliteError, EngineError, StoreError
from aglite.external import External
from aglite.full_disk import FullDisk
from aglite.lock import hold
from aglite.net import Listener, bind
from aglite.notify import Notifier
from aglite.output import Output
from aglite.paths import RunDir, write_private
from aglite.phases import PhaseMachine
from aglite.retention import Keeper
from aglite.runtime import Runtime
from aglite.sandboxes import end_leaked
from aglite.secrecy import hide_process
from aglite.store import Store
from aglite.training.loop import TrainingLoop

INTERRUPTED = 130
SILENT_S = 5
"""Silence of the model worker that the status mentions."""
RESTART_WAIT_S = 1.0
"""Before a model worker is replaced; twice as long the second time."""


class Supervisor:
    """What `up`, `serve`, `eval` and `run` have in common; each gives `work`.

    The first SIGINT or SIGTERM asks `work` to end cleanly, the second ends everything at once. In either case no
    process is left behind and the store is consistent.
    """

    trains = False
    restarts = 0
    """How often in a row a model worker that died is replaced, without a new checkpoint in between."""

    def __init__(self, recipe: Recipe, run_dir: RunDir, on_line: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.on_line = on_line if isinstance(on_line, Output) else Output(on_line)
        self.started_at = time.time()
        self.loop: TrainingLoop | None = None
        self.interrupted = False
        self.ended = False
        self._stop_asked = self._stop_after_step = False
        self._problem = ""
        with usable(run_dir):
            run_dir.create()
            self._lock = hold(run_dir)
        try:
            self.store = Store.open(
                run_dir.db, keep_messages=recipe.retention.traffic == "all", redactor=recipe.stored_redactor
            )
            self.runtime = Runtime(recipe, run_dir, self.store, on_line=self.on_line)
        except BaseException:
            self._lock.close()
            raise
        self.phases = PhaseMachine(self.store)
        self.disk = FullDisk(self)
        self.external = External(self)
        self.redactor = recipe.redact.redactor()
        """Masks what is shown."""
        self._keeper = Keeper(self.store, run_dir, recipe.retention)
        self._notifier = Notifier(self)
        self._work: asyncio.Task[int] | None = None

    # what a kind of run gives

    async def work(self) -> int:
        """Do what the run is for on `self.runtime`, which it starts; returns the exit code."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Called after `work` was asked to stop and has ended: write down what the next start needs."""

    # asked for by people, through signals and the control API

    def ask(self, what: str) -> dict[str, str]:
        """Do as the control API says. Raises AgliteError where it makes no sense now."""
        if what in ("stop", "stop now"):
            self.stop(now=what == "stop now")
            return {"state": "stopping"}
        if self.loop is None or self.phases.current == "starting":
            raise AgliteError(
                f"cannot {what} now: nothing is being trained (yet)", "try again when the model is loaded"
            )
        if what == "stop after step":
            self._stop_after_step = True
            return {"state": f"stopping after step {self.loop.stop_after_step()}"}
        actions = {
            "preempt": lambda loop: loop.preempt(),
            "pause": lambda loop: loop.pause("asked for"),
            "resume": lambda loop: loop.resume(),
            "checkpoint": lambda loop: loop.checkpoint_soon(),
            "evaluate": lambda loop: loop.evaluate_soon(),
        }
        actions[what](self.loop)
        return {"state": what}

    def stop(self, *, now: bool = False) -> None:
        """End the run: cleanly, or (`now`, or when asked a second time) without waiting for anything."""
        again, self._stop_asked = self._stop_asked, True
        self.store.stop_waiting()  # for room on the disk: it might never come
        if self._work is None:
            return
        if now or again:
            self.on_line("stopping now")
            self._work.cancel("stop now")
        elif self.loop is None or self.phases.current == "starting":
            self._work.cancel("stop")
        else:
            waits = (
                "the update to end"
                if self.phases.current in ("draining", "sleeping", "training", "syncing")
                else "rollouts to end"
            )
            self.on_line(f"stopping: waiting for {waits}, then a checkpoint is written (again: stop at once)")
            self.loop.stop()

    async def kill(self, rollout_id: str) -> None:
        """End one rollout. Raises AgliteError when it is not running and does not wait to."""
        launcher = self.runtime.launcher
        if launcher is not None and (launcher.kill(rollout_id) or await end_leaked(self, rollout_id)):
            return
        if not await self.external.kill(rollout_id):
            raise AgliteError(f"rollout {rollout_id} is not running", "see `aglite rollouts --state running`")

    async def retry(self, rollout_id: str) -> None:
        """Launch a rollout that failed or was cancelled again. Raises AgliteError where that makes no sense any more,
        NotFoundError when there is no such rollout."""
        row = self.store.rollout(rollout_id)
        if row["backend"] == "external":
            raise AgliteError(
                f"rollout {rollout_id} was launched by somebody else", "open a new one: POST /api/rollouts"
            )
        evaluation = self.loop.evaluation if self.loop else None
        for groups in (self.loop and self.loop.groups, evaluation and evaluation.groups):
            if groups and await groups.retry(rollout_id):
                return
        raise AgliteError(
            f"rollout {rollout_id} is {row['state']}, and its group is complete or no longer of use",
            "only a rollout whose group still waits for others can be retried",
        )

    def hindrance(self) -> str:
        """What keeps the run from going on until somebody mends it; '' if nothing does."""
        if self.disk.full:
            return self.disk.what
        if self.loop and self.loop.hindered:
            return self.loop.hindered
        return self.runtime.launcher.blocked if self.runtime.launcher is not None else ""

    def message(self) -> str:
        """One line on what it is doing or what is wrong, for the status."""
        if self._problem:
            return self._problem
        if self.disk.full:
            return f"paused: {self.disk.what}"
        if (silent := self.runtime.silent_s) >= SILENT_S:
            who = self.runtime.worker.name
            return f"the {who} has given no sign of life for {silent} s (it is ended after {HEARTBEAT_TIMEOUT_S:g})"
        if stalled := self.runtime.stalled:
            return stalled
        if self.phases.current == "starting":
            return self.runtime.loading or "starting"
        if self.loop and self.loop.paused:
            return f"paused: {self.loop.paused}"
        if self.runtime.launcher is not None and (blocked := self.runtime.launcher.blocked):
            return blocked
        if self.loop and self.loop.last_step is not None:
            return f"stops after step {self.loop.last_step}"
        if self.loop and self.loop.evaluation:
            return f"evaluating: {self.loop.evaluation.done} of {self.loop.evaluation.of} rollouts"
        progress = self.runtime.progress
        if self.phases.current == "training" and progress:
            return f"training: micro-batch {progress.get('done', 0)} of {progress.get('of', 0)}"
        return ""

    # the process

    def run(self) -> int:
        """Run to the end in an event loop of its own; returns the exit code."""
        hide_process()  # agents run as the same user
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._main())

    async def _main(self) -> int:
        self._listen_to_signals()
        self.disk.watch()
        token = secrets.token_urlsafe(24)
        control = Listener(
            create_control_app(self, token),
            bind("127.0.0.1", self.recipe.gateway.control_port, "the control API", "gateway.control_port"),
        )
        async with contextlib.AsyncExitStack() as closing:  # the last one first, each whatever the others raise
            closing.callback(self._lock.close)
            closing.callback(self.store.close)
            closing.push_async_callback(control.stop)
            await control.start()
            closing.callback(self.run_dir.control.unlink, missing_ok=True)
            write_private(self.run_dir.control, json.dumps({"url": control.url, "token": token, "pid": os.getpid()}))
            closing.push_async_callback(self._end, asyncio.create_task(echo(self, self.on_line, self._is_last_word)))
            closing.push_async_callback(self._notifier.close)
            closing.push_async_callback(lambda: self.runtime.stop())  # the one there is then
            closing.push_async_callback(self._keeper.stop)
            try:
                await self.store.set_meta("redact", self.recipe.redact.model_dump())
                if self.recipe.stored_redactor:
                    await self.store.set_meta("masked_at", time.time())
                await self.phases.set("starting")
                self._notifier.start()
                try:
                    code = await self._supervise()
                finally:  # what is written from here on must not keep the process from ending
                    self.store.stop_waiting()
                if self.loop is not None:
                    self._notifier.tell("done" if code == 0 else "stopped", "")
                return code
            except AgliteError as error:
                error.message = self.redactor.text(error.message)  # it may quote what an agent printed
                await self._note(error)
                raise
            except OSError as error:
                problem = AgliteError(f"the run cannot go on: {error}", "see that its disk has room and can be written")
                await self._note(problem)
                raise problem from error
            except Exception as error:
                self._notifier.tell("failed", f"{type(error).__name__}, a mistake of aglite's own; see the log")
                raise

    async def keep_to_retention(self) -> None:
        """Remove what the recipe does not want kept, now and from now on. Nothing may run yet."""
        await self._keeper.start()

    async def _note(self, error: AgliteError) -> None:
        self._problem = error.message.partition("\n")[0]
        self._notifier.tell("failed", f"{error.message}\n{error.mend}".strip())
        with contextlib.suppress(StoreError):  # the disk may be full; whoever started the run is told all the same
            await self.store.add_event("error", "run", error.message, {"mend": error.mend})

    def _is_last_word(self, event: dict[str, Any]) -> bool:
        """Whether an event is the error that ends the run: it is raised, and whoever started the run says it."""
        return bool(self._problem) and self._problem in event["text"]

    async def _end(self, echo: asyncio.Task[None]) -> None:
        try:
            await self.phases.set("stopped", self._problem)
        except StoreError:
            if not self._problem:
                raise
        finally:
            self.ended = True
            await echo

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    async def _supervise(self) -> int:
        """Run `work`; where the model worker dies and a fresh one may help, again from the last checkpoint."""
        tries, checkpoint = 0, 0
        while True:
            try:
                return await self._run_work()
            except AgliteError as error:
                crash = self.runtime.crash
                if crash is None:
                    raise
                newest = max((row["id"] for row in self.store.checkpoints()), default=0)
                tries, checkpoint = (tries + 1 if newest == checkpoint else 1), newest
                if tries > self.restarts or not self.runtime.ready or self._stop_asked:
                    raise crash.error() from error
                await self._replace_worker(crash, tries)

    async def _replace_worker(self, crash: ChildExit, tries: int) -> None:
        again = f"starting again from the last checkpoint (try {tries} of {self.restarts})"
        await self.store.add_event("error", "engine", f"{crash.error().message}\n{again}")
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.groups.stopping = True  # what the crash did to rollouts is no result of theirs
        await self.runtime.stop()
        if loop is not None:
            await loop.groups.drain()
        await self.phases.set("stopped", crash.reason)
        self.runtime = Runtime(self.recipe, self.run_dir, self.store, on_line=self.on_line, port=self.runtime.port)
        self.external = External(self)
        await asyncio.sleep(RESTART_WAIT_S * 2 ** (tries - 1))
        await self.phases.set("starting", again)

    async def _run_work(self) -> int:
        """Run `work`, watching the model worker and the wish to stop."""
        if self._stop_asked or self.interrupted:
            return INTERRUPTED
        self._work = asyncio.create_task(self._work_and_finish())
        watch = asyncio.create_task(self._worker_exit())
        try:
            await asyncio.wait({self._work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                self._work.cancel()
                await asyncio.wait({self._work})
                raise watch.result()
            if self._work.cancelled():
                return INTERRUPTED
            code = self._work.result()
        finally:
            watch.cancel()
        return INTERRUPTED if self.interrupted else code

    async def _work_and_finish(self) -> int:
        code = await self.work()
        if self._stop_asked or self._stop_after_step:
            await self.finish()
        return code

    async def _worker_exit(self) -> EngineError:
        """Waits until the model worker is gone and says why."""
        await self.runtime.worker_started.wait()
        return (await asyncio.shield(self.runtime.worker.exited)).error()

    def _signal(self) -> None:
        self.interrupted = True
        self.stop()

    def _hang_up(self) -> None:
        """The terminal was closed. Shell and kernel may both say so: that is no second wish."""
        if not self.interrupted:
            self._signal()


@contextlib.contextmanager
def usable(run_dir: RunDir) -> Iterator[None]:
    """Word what the file system refuses, such as writing in a read-only place, for the person who chose it."""
    try:
        yield
    except OSError as error:
        raise AgliteError(
            f"{run_dir.path} cannot be used: {error}",
            "choose another place with --dir, or call aglite in a folder that you may write to",
        ) from None


def run(recipe: Recipe, run_dir: RunDir | Path, *, mode: str = "auto", on_line: Callable[[str], None] = print) -> int:
    """`aglite up` in the foreground: train `recipe` in `run_dir`; returns the exit code.

    `mode`: `auto` goes on with an existing run, `resume` insists on one, `fresh` renames an existing one away first.
    """
    from aglite.train import train

    return train(recipe, run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir), mode=mode, on_line=on_line)
