"""Where the screens get what the feed does not bring: the supervisor while one runs, else the database."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from aglite.client import ControlClient
from aglite.paths import RunDir
from aglite.stored import StoredRun

Answer = TypeVar("Answer")


class Source:
    """Answers questions from any thread."""

    def __init__(self, run_dir: RunDir, client: ControlClient) -> None:
        self.run_dir = run_dir
        self.client = client

    def ask(self, question: Callable[[ControlClient | StoredRun], Answer]) -> Answer:
        """The answer to `question`, which is given the client or the stored run: their methods are the same. Raises
        AgliteError."""
        if self.client.pid is not None or not self.run_dir.db.exists():
            return question(self.client)
        with closing(StoredRun(self.run_dir)) as stored:
            return question(stored)
