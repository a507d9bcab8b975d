"""A run as lines until it ends: `aglite attach` where there is no terminal, or where the UI is not wanted."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

from aglite.cli.where import open_run
from aglite.client import ControlError
from aglite.output import Output
from aglite.paths import RunDir

WAIT_S = 0.2


def follow(run: RunDir, output: Output) -> None:
    """Give `output` all events of the run from its beginning, then new ones and the status, until its supervisor ends.
    Raises what reading it raises."""
    source = open_run(run.path)
    events: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue(maxsize=1000)

    def read() -> None:
        try:
            for event in source.events():
                events.put(event)
            events.put(None)
        except BaseException as error:  # raised where it can be seen
            events.put(error)

    threading.Thread(target=read, daemon=True).start()
    due = 0.0
    while True:
        try:
            event = events.get(timeout=WAIT_S)
        except queue.Empty:
            event = {}
        if event is None or output.unheard:  # `| head`
            return
        if isinstance(event, BaseException):
            raise event
        if event:
            output.event(event)
        elif source.pid is not None and time.monotonic() >= due:  # what has happened before is told
            due = time.monotonic() + output.every_s
            with contextlib.suppress(ControlError):  # it is busy, or has just ended: the events will tell
                output.status(source.status())
