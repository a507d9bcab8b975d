"""What happens in a run, passed on as it happens to whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aglite.errors import StoreError
from aglite.output import Output
from aglite.shown import shown
from aglite.status import status

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

POLL_S = 0.2


async def echo(supervisor: Supervisor, output: Output, is_last_word: Callable[[dict[str, Any]], bool]) -> None:
    """Give `output` the events from now on, and the status as often as it wants it, until the run has ended and all
    events are out. `is_last_word` finds the error that ends the run, which not every output says."""
    store = supervisor.store
    cursor = store.last_event_id()
    due = time.monotonic() + output.every_s
    while True:
        ended = supervisor.ended  # before reading: what was written until then is among the rows
        rows = store.events(after=cursor, limit=500)
        for row in rows:
            cursor = row["id"]
            if output.tells_errors or not is_last_word(row):
                output.event(shown(row, supervisor.redactor))
        if ended and not rows:
            output.close()
            return
        if time.monotonic() >= due:
            due = time.monotonic() + output.every_s
            with contextlib.suppress(OSError, StoreError):  # the directory may be gone: the run notices, and says so
                output.status(shown(status(supervisor), supervisor.redactor))
        if not rows:
            await asyncio.sleep(POLL_S)
