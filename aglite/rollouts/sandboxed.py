"""Programs that grade in a fresh container from the agent's image: same limits, same network, and of the agent's work
what was collected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aglite.errors import RecipeError
from aglite.rollouts.backends import Launch, Running
from aglite.rollouts.causes import BackendError
from aglite.rollouts.process import Exit

Start = Callable[[Launch], Awaitable[Running]]
"""Starts an attempt in a place of its own: `Backend.start`."""


class NotRun(Exception):
    """The program could not be run, or was lost; the text says why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that has ended, with all it started."""

    running: Running
    """What it left, until the context ends."""
    exit: Exit
    late: bool
    """It did not end by itself in time."""

    @property
    def out_of_memory(self) -> bool:
        return self.exit.cause is not None and self.exit.cause.code == "memory"


@contextlib.asynccontextmanager
async def run(start: Start, launch: Launch, timeout_s: float, stop: asyncio.Future[Any]) -> AsyncIterator[Ran]:
    """Run a program to its end, to the end of its time, or until `stop` is done. Raises NotRun."""
    try:
        running = await start(launch)
    except RecipeError as error:
        raise NotRun(f"{error.message} ({error.mend})") from None
    except (BackendError, OSError) as error:
        raise NotRun(f"its container could not be started: {error}") from None
    try:
        await asyncio.wait({running.exited, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        late = not running.exited.done()
        await running.stop()
        exit = running.exited.result()
        if exit.cause and exit.cause.kind == "infrastructure" and not stop.done():
            raise NotRun(str(exit.cause))
        yield Ran(running, exit, late)
    except BackendError as error:
        raise NotRun(str(error)) from None
    finally:
        await running.stop()
        await running.remove()
