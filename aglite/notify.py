"""Telling somebody that a run has ended, stands still or needs a person: a command, a webhook, or both.

It happens beside the run: nothing waits for it but the very end, and that not for long; what goes wrong with it is an
event like others. Addresses may be secrets, so only their host is ever written down, and nothing that a command prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aglite.config import Recipe
from aglite.errors import StoreError, Undelivered
from aglite.history import live_steps
from aglite.units import clock, plain, reward

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

LOOK_S = 5.0
"""How often it is looked whether the run moves."""
PATIENCE_S = 60.0
"""How long something has to be in the way before a person is called: much mends itself."""
WAITS_S = (1.0, 4.0)
"""Before each further try to deliver a message."""
COMMAND_S = 30.0
"""Longest time that a command may take."""
GRACE_S = 20.0
"""How long the end of a run waits for its messages."""


class Watch:
    """Decides from what is seen of a run whether it needs a person. Does no I/O; times are in seconds."""

    def __init__(self, stalled_after_s: float) -> None:
        self._stalled_after_s = stalled_after_s
        self._pulse: Hashable = None
        self._moved = 0.0
        self._hindered: float | None = None
        self._told: set[str] = set()

    def look(self, now: float, pulse: Hashable, hindrance: str, *, held: bool) -> list[tuple[str, str]]:
        """What to tell, as (occasion, why). `pulse` differs whenever the run has moved; `hindrance` is what keeps it
        from going on until somebody mends it, '' if nothing does; `held`: a person wants it to stand still."""
        found = []
        if pulse != self._pulse or held or hindrance:
            self._pulse, self._moved = pulse, now
            self._told.discard("stalled")
        elif now - self._moved >= self._stalled_after_s and "stalled" not in self._told:
            self._told.add("stalled")
            found.append(("stalled", f"nothing has moved for {clock(now - self._moved)}"))
        if not hindrance:
            self._hindered = None
            self._told.discard("paused")
            return found
        self._hindered = now if self._hindered is None else self._hindered
        if now - self._hindered >= PATIENCE_S and "paused" not in self._told:
            self._told.add("paused")
            found.append(("paused", hindrance))
        return found


class Notifier:
    """Watches one run and tells what its recipe wants told. Without a `notify` section it does nothing."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._on = supervisor.recipe.notify.on if supervisor.recipe.notify else ()
        self._ways = ways(supervisor.recipe) if supervisor.trains else []
        self._sending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._ways and {"stalled", "paused"} & set(self._on):
            self._watching = asyncio.create_task(self._watch())

    def tell(self, occasion: str, why: str) -> None:
        """Send a message, if the recipe wants to be told of such an occasion; comes back at once."""
        if occasion not in self._on:
            return
        supervisor = self._supervisor
        message = supervisor.redactor.value(compose(supervisor, occasion, why), MESSAGE_KEYS)
        for name, send in self._ways:
            task = asyncio.create_task(self._deliver(name, send, message))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        """Wait a little for messages under way, and give up on what is then left."""
        if self._watching:
            self._watching.cancel()
        if not self._sending:
            return
        late = (await asyncio.wait(self._sending, timeout=GRACE_S))[1]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
            await self._note("warning", "the run has ended before its last message was delivered")

    async def _deliver(self, name: str, send: Send, message: dict[str, Any]) -> None:
        problem = await deliver(send, message)
        if problem:
            await self._note("warning", f"{name} could not be told ({message['event']}): {problem}")
        else:
            await self._note("info", f"{name} was told: {message['event']}")

    async def _note(self, level: str, text: str) -> None:
        with contextlib.suppress(StoreError):  # the disk may be what the message is about
            await self._supervisor.store.add_event(level, "notify", text)

    async def _watch(self) -> None:
        supervisor = self._supervisor
        stalled_after_s = supervisor.recipe.notify.stalled_after_s
        watch = Watch(stalled_after_s)
        while True:
            held = supervisor.phases.current == "paused"
            try:
                seen = pulse(supervisor)
            except StoreError as error:  # a disk that went away: nothing moves until it is back
                seen = str(error)
            found = watch.look(time.monotonic(), seen, supervisor.hindrance(), held=held)
            for occasion, why in found:
                self.tell(occasion, why)
            await asyncio.sleep(min(LOOK_S, stalled_after_s / 2))


MESSAGE_KEYS = frozenset({"event", "run", "host", "dir", "phase"})
"""Keys of a message whose values are names: they are not masked."""


def pulse(supervisor: Supervisor) -> Hashable:
    """Something that is another after everything by which a run moves."""
    runtime = supervisor.runtime
    return (
        supervisor.phases.since,
        runtime.loading,
        runtime.stats.sampled_tokens,
        tuple(runtime.progress.values()),
        tuple(supervisor.store.counts_by_state().values()),
    )


def compose(supervisor: Supervisor, occasion: str, why: str) -> dict[str, Any]:
    """The message: `text` says it all in a line or two, the other keys are for programs."""
    loop, recipe, host = supervisor.loop, supervisor.recipe, socket.gethostname()
    step = loop.state.step if loop else 0
    steps = live_steps(supervisor.store)
    evaluations = [row["result"] for row in supervisor.store.evaluations() if row["state"] == "done"]
    parts = [f"aglite: {recipe.name} on {host} {VERBS[occasion]}", f"step {step} of {recipe.trainer.steps}"]
    if evaluations:
        means = [reward(result["mean"]) for result in (evaluations[0], evaluations[-1])]
        parts.append(f"validation {' → '.join(means) if len(evaluations) > 1 else means[0]}")
    return {
        "event": occasion,
        "text": plain(", ".join(parts) + (f"\n{why}" if why else "")),
        "why": plain(why),
        "run": recipe.name,
        "host": host,
        "dir": str(supervisor.run_dir.path.resolve()),
        "at": time.time(),
        "phase": supervisor.phases.current,
        "step": step,
        "steps": recipe.trainer.steps,
        "reward": steps[-1]["metrics"].get("reward_mean") if steps else None,
        "validation": evaluations[-1]["mean"] if evaluations else None,
    }


VERBS = {
    "done": "is done",
    "failed": "failed",
    "stalled": "stands still",
    "paused": "needs somebody",
    "stopped": "was stopped",
}

Send = Callable[[dict[str, Any]], Any]


def ways(recipe: Recipe) -> list[tuple[str, Send]]:
    """How the recipe's people are reached: (name to write down, coroutine function that tries once)."""
    settings, found = recipe.notify, list[tuple[str, Send]]()
    if settings is None:
        return found
    if settings.command:
        found.append((settings.command[0], lambda message: _run(settings.command, recipe, message)))
    url = settings.url or os.environ.get(settings.url_env, "")
    if url:
        from aglite.webhook import post  # now, not when the disk is full; and only here, as it takes its time

        found.append((urlsplit(url).hostname or settings.url_env, lambda message: post(url, message)))
    elif settings.url_env:
        found.append((settings.url_env, _nowhere))
    return found


async def deliver(send: Send, message: dict[str, Any]) -> str:
    """Try it a few times; '' once it worked, else why it did not."""
    for wait in (*WAITS_S, None):
        try:
            await send(message)
            return ""
        except Undelivered as problem:
            why = str(problem)
            if wait is None or problem.lasting:
                break
            await asyncio.sleep(wait)
    return why


async def _nowhere(_: dict[str, Any]) -> None:
    raise Undelivered("the variable that notify.url_env names is not set", lasting=True)


def program_of(command: list[str], folder: Path) -> str | None:
    """The executable that the first word of `notify.command` means: `python` is the one that runs aglite, a path starts
    from the recipe folder. None if there is none."""
    program = command[0]
    if program == "python":
        return sys.executable
    if "/" in program:
        beside = folder / program
        return str(beside) if beside.is_file() and os.access(beside, os.X_OK) else None
    return shutil.which(program)


async def _run(command: list[str], recipe: Recipe, message: dict[str, Any]) -> None:
    environment = {**os.environ, "AGLITE_EVENT": message["event"], "AGLITE_TEXT": message["text"]}
    program = program_of(command, recipe.folder)
    if program is None:
        raise Undelivered("there is no such program", lasting=True)
    try:
        child = await asyncio.create_subprocess_exec(
            program,
            *command[1:],
            cwd=recipe.folder,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise Undelivered(f"it cannot be started ({error.strerror})", lasting=True) from None
    try:
        async with asyncio.timeout(COMMAND_S):
            await child.communicate(json.dumps(message).encode())
    except TimeoutError:
        raise Undelivered(f"it was not done within {COMMAND_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise Undelivered(f"exit code {child.returncode}")
