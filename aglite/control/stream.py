"""Events as server-sent events, from a cursor on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aglite import strict_json
from aglite.shown import shown

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

POLL_S = 0.25
KEEP_ALIVE_S = 15.0
RETRY_MS = 1000
"""How long clients wait before they reconnect."""


async def event_stream(supervisor: Supervisor, cursor: int) -> AsyncIterator[str]:
    """Events after `cursor` as they come, with a comment now and then so that a dead connection is noticed. Ends with
    the run.

    Each event's `id` is its cursor: a client that reconnects with the last one it saw (`Last-Event-ID`) misses none.
    """
    yield f"retry: {RETRY_MS}\n\n"
    quiet = 0.0
    while True:
        ended = supervisor.ended  # before reading: what was written until then is among the rows
        rows = supervisor.store.events(after=cursor, limit=500)
        for row in rows:
            cursor = row["id"]
            yield f"id: {cursor}\ndata: {strict_json.dumps(shown(row, supervisor.redactor))}\n\n"
        if rows:
            quiet = 0.0
        elif ended:
            return
        else:
            await asyncio.sleep(POLL_S)
            quiet += POLL_S
            if quiet >= KEEP_ALIVE_S:
                quiet = 0.0
                yield ": still here\n\n"
