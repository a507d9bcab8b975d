"""All events of a run as they happen, read in a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

from aglite.client import ControlClient
from aglite.errors import AgliteError
from aglite.stored import StoredRun
from aglite.tui.source import Source
from aglite.units import plain_json


class EventStream:
    """Reads events past `cursor` and holds them until they are taken."""

    def __init__(self, source: Source) -> None:
        self.cursor = 0
        self.problem = ""
        """Why there are no more; '' while there may be."""
        self._source = source
        self._new: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def reading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Go on reading after the cursor, where nothing reads already."""
        if not self.reading and not self._stopped:
            self.problem = ""
            self._thread = threading.Thread(target=self._run, name="events", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True

    def take(self) -> list[dict[str, Any]]:
        """Those that came since the last time, in order."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def _run(self) -> None:
        try:
            self._source.ask(self._read)
        except AgliteError as error:
            self.problem = error.message

    def _read(self, run: ControlClient | StoredRun) -> None:
        for event in run.events(after=self.cursor):
            if self._stopped:
                return
            with self._lock:
                self._new.append(plain_json(event))
                self.cursor = event["id"]
