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
from aglite.errors import AgliteError, EngineError, StoreError
from aglite.external import External
from aglite.headless import line
from aglite.lock import hold
from aglite.net import Listener, bind
from aglite.paths import RunDir
from aglite.phases import PhaseMachine
from aglite.runtime import Runtime
from aglite.store import Store
from aglite.training.loop import TrainingLoop

INTERRUPTED = 130


class Supervisor:
    """What `up`, `serve`, `eval` and `run` have in common; each gives `work`.

    The first SIGINT or SIGTERM asks `work` to end cleanly, the second ends everything at once. In either case no
    process is left behind and the store is consistent.
    """

    trains = False

    def __init__(self, recipe: Recipe, run_dir: RunDir, on_line: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.on_line = _Voice(on_line)
        self.started_at = time.time()
        self.loop: TrainingLoop | None = None
        self.interrupted = False
        self.ended = False
        self._stop_asked = False
        self._problem = ""
        with usable(run_dir):
            run_dir.create()
            self._lock = hold(run_dir)
        try:
            self.store = Store.open(run_dir.db, keep_messages=recipe.retention.traffic == "all")
            self.runtime = Runtime(recipe, run_dir, self.store, on_line=self.on_line)
        except BaseException:
            self._lock.close()
            raise
        self.phases = PhaseMachine(self.store)
        self.external = External(self)
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
        if what.startswith("stop"):
            self.stop(now=what == "stop now")
            return {"state": "stopping"}
        if self.loop is None or self.phases.current == "starting":
            raise AgliteError(
                f"cannot {what} now: nothing is being trained (yet)", "try again when the model is loaded"
            )
        actions = {
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
        if self._work is None:
            return
        if now or again:
            self.on_line("stopping now")
            self._work.cancel("stop now")
        elif self.loop is None or self.phases.current == "starting":
            self._work.cancel("stop")
        else:
            waits = (
                "the update to end" if self.phases.current in ("draining", "training", "syncing") else "rollouts to end"
            )
            self.on_line(f"stopping: waiting for {waits}, then a checkpoint is written (again: stop at once)")
            self.loop.stop()

    async def kill(self, rollout_id: str) -> None:
        """End one rollout. Raises AgliteError when it is not running."""
        launcher = self.runtime.launcher
        if launcher is None or rollout_id not in launcher.running:
            raise AgliteError(f"rollout {rollout_id} is not running", "see `aglite rollouts --state running`")
        launcher.kill(rollout_id)

    def message(self) -> str:
        """One line on what it is doing or what is wrong, for the status."""
        if self._problem:
            return self._problem
        if self.phases.current == "starting":
            return self.runtime.loading or "starting"
        if self.loop and self.loop.paused:
            return f"paused: {self.loop.paused}"
        if self.loop and self.loop.evaluation:
            return f"evaluating: {self.loop.evaluation.done} of {self.loop.evaluation.of} rollouts"
        progress = self.runtime.progress
        if self.phases.current == "training" and progress:
            return f"training: micro-batch {progress.get('done', 0)} of {progress.get('of', 0)}"
        return ""

    # the process

    def run(self) -> int:
        """Run to the end in an event loop of its own; returns the exit code."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._main())

    async def _main(self) -> int:
        self._listen_to_signals()
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
            _write_private(self.run_dir.control, {"url": control.url, "token": token, "pid": os.getpid()})
            closing.push_async_callback(self._end, asyncio.create_task(self._echo()))
            closing.push_async_callback(self.runtime.stop)
            try:
                await self.phases.set("starting")
                return await self._supervise()
            except AgliteError as error:
                await self._note(error)
                raise
            except OSError as error:
                problem = AgliteError(f"the run cannot go on: {error}", "see that its disk has room and can be written")
                await self._note(problem)
                raise problem from error

    async def _note(self, error: AgliteError) -> None:
        self._problem = error.message.partition("\n")[0]
        with contextlib.suppress(StoreError):  # the disk may be full; whoever started the run is told all the same
            await self.store.add_event("error", "run", error.message, {"mend": error.mend})

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
        if self._stop_asked:
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

    async def _echo(self) -> None:
        """Print events as plain lines until the run has ended and all are out."""
        cursor = self.store.last_event_id()
        while True:
            rows = self.store.events(after=cursor, limit=500)
            for row in rows:
                cursor = row["id"]
                if (text := line(row)) is not None:
                    self.on_line(text)
            if self.ended and not rows:
                return
            if not rows:
                await asyncio.sleep(0.2)


class _Voice:
    """Says lines as long as they can be said: a closed terminal, a closed pipe or a full disk does not end a run. All
    that matters is among the events in the store, too."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line

    def __call__(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._on_line(line)


@contextlib.contextmanager
def usable(run_dir: RunDir) -> Iterator[None]:
    """Word what the file system refuses, such as writing in a read-only place, for the person who chose it."""
    try:
        yield
    except OSError as error:
        raise AgliteError(f"{run_dir.path} cannot be used: {error}", "choose another place with --dir") from None


def _write_private(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(data, file)
    temporary.replace(path)


def run(recipe: Recipe, run_dir: RunDir | Path, *, mode: str = "auto", on_line: Callable[[str], None] = print) -> int:
    """`aglite up` in the foreground: train `recipe` in `run_dir`; returns the exit code.

    `mode`: `auto` goes on with an existing run, `resume` insists on one, `fresh` renames an existing one away first.
    """
    from aglite.train import train

    return train(recipe, run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir), mode=mode, on_line=on_line)
