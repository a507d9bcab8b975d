"""trackio: in its local database (TRACKIO_DIR), or where its own settings send it."""

from __future__ import annotations

import os
import warnings
from typing import Any

from aglite.errors import AgliteError
from aglite.tracking.missing import library
from aglite.tracking.points import About, Point


class Trackio:
    keeps = True

    def __init__(self) -> None:
        library("trackio")
        self._project = os.environ.get("TRACKIO_PROJECT") or "aglite"
        self._run: Any = None
        self._failures: list[str] = []

    def open(self, run: About, generation: int, fresh: bool) -> None:
        import trackio

        warnings.showwarning = self._warned
        warnings.simplefilter("always")
        if fresh:
            self._forget(run.id)
        self._run = trackio.init(
            self._project,
            name=run.id,
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _forget(self, name: str) -> None:
        import trackio

        try:
            runs = list(trackio.Api().runs(self._project))
        except ValueError:  # there is no such project yet
            return
        for run in runs:
            if run.name == name:
                run.delete()

    def _warned(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """trackio never raises while it logs: it warns, and goes on without what it could not write."""
        if "trackio" in str(message):
            self._failures.append(str(message))

    def write(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step)

    def flush(self) -> None:
        if self._failures:
            raise AgliteError(f"trackio: {self._failures[0]}", "see what it says of its database, then start again")

    def close(self) -> None:
        self._run.finish()
        self.flush()
