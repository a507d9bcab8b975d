"""The one thread that writes. Whoever waits while a commit runs shares the next one (group commit)."""

from __future__ import annotations

import asyncio
import queue
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aglite.errors import StoreError
from aglite.store.db import explain

Result = TypeVar("Result")
Operation = Callable[[sqlite3.Connection], Result]

MAX_BATCH = 512
NO_ROOM_BYTES = 1 << 20
FULL_POLL_S = 0.5
"""How often a write that found the disk full is tried again, where writes wait for room."""


@dataclass(slots=True, eq=False)
class _Job:
    operation: Operation
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Runs operations on `connection` in the order they were handed in, each whole or not at all.

    An operation may run a second time (in a transaction of its own) when the batch it was in could not be committed,
    so it must change nothing but the database.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.commits = 0
        self.writes = 0
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._full = False
        self._on_full: Callable[[bool], None] | None = None
        self._impatient = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aglite-store-writer", daemon=True)
        self._thread.start()

    async def write(self, operation: Operation[Result]) -> Result:
        """Run `operation` and return its result after it is committed. Raises what it raised, with nothing changed,
        or StoreError when the file could not be written. Cancelling the caller does not take the write back."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._path} is closed", "open the store again")
            self._queue.put(_Job(operation, loop, future))
        return await future

    def wait_when_full(self, on_full: Callable[[bool], None]) -> None:
        """From now on a write that finds the disk full waits for room instead of failing, and all later ones with it.
        The thread calls `on_full` with True when that begins and with False when it is over."""
        self._on_full = on_full

    def stop_waiting(self) -> None:
        """Let writes fail again that find the disk full, those that wait included."""
        self._impatient.set()

    def close(self) -> None:
        """Commit what was handed in, then end the thread and close the connection. Waits for no room."""
        self.stop_waiting()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        open_ = True
        while open_:
            batch = [self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            jobs = [job for job in batch if job is not None]
            open_ = len(jobs) == len(batch)
            if jobs:
                self._commit(jobs)
                _resolve(jobs)

    def _commit(self, jobs: list[_Job]) -> None:
        error = self._try(jobs)
        while error is not None and self._waits(error):
            self._say_full(True)
            self._impatient.wait(FULL_POLL_S)
            error = self._try(jobs)
        if error is None:
            self._say_full(False)
        elif len(jobs) == 1:
            jobs[0].error = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
        else:
            # One too large for the disk must not take the others with it: each gets its own transaction.
            for job in jobs:
                self._commit([job])

    def _try(self, jobs: list[_Job]) -> BaseException | None:
        for job in jobs:
            job.result = job.error = None
        try:
            self._transaction(jobs)
        except BaseException as error:
            return error
        return None

    def _waits(self, error: BaseException) -> bool:
        """Whether an error is none yet, as the write is to wait for room on the disk."""
        if self._on_full is None or self._impatient.is_set():
            return False
        name = str(getattr(error, "sqlite_errorname", ""))
        if name.startswith("SQLITE_IOERR"):  # which is what the write-ahead log's own files give
            try:
                return shutil.disk_usage(self._path.parent).free < NO_ROOM_BYTES
            except OSError:  # the folder has gone with its disk: no room will ever come
                return False
        return name == "SQLITE_FULL"

    def _say_full(self, full: bool) -> None:
        if self._on_full is not None and full != self._full:
            self._full = full
            self._on_full(full)

    def _transaction(self, jobs: list[_Job]) -> None:
        db = self._connection
        self._roll_back()
        db.execute("BEGIN IMMEDIATE")
        try:
            for job in jobs:
                self._apply(job)
            db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self.commits += 1
        self.writes += len(jobs)

    def _apply(self, job: _Job) -> None:
        db = self._connection
        db.execute("SAVEPOINT job")
        try:
            job.result = job.operation(db)
        except Exception as error:
            # a full disk can make SQLite undo the whole transaction
            if not db.in_transaction or self._waits(error):
                raise
            db.execute("ROLLBACK TO job")
            job.error = explain(error, self._path) if isinstance(error, sqlite3.Error) else error
        db.execute("RELEASE job")

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _resolve(jobs: list[_Job]) -> None:
    """Wake the callers, once for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, group)
        except RuntimeError:
            # The loop was closed: its callers are gone, and what they wrote is committed all the same.
            continue


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.cancelled():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
