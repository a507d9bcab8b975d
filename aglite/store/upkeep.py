"""Looking after a run's database: taking out what is not to be kept, masking, checking."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Collection
from dataclasses import dataclass

from aglite.redact import Redactor
from aglite.store import db, invariants, prune
from aglite.store.masking import mask_stored
from aglite.store.rollouts import RolloutStore

AT_ONCE = 50
"""Rollouts whose traffic is removed in one commit: calls that are recorded meanwhile do not wait for long."""

MOST_PROBLEMS = 100


@dataclass(slots=True)
class Pruned:
    """What was (or would be) removed."""

    rollouts: list[str]
    """Whose traffic, by id."""
    spared: list[str]
    """Rollouts that the rule applies to and training still needs."""
    calls: int = 0
    messages: int = 0


class UpkeepStore(RolloutStore):
    def prunable(
        self, *, before: float | None = None, step: int | None = None, states: Collection[str] | None = None
    ) -> Pruned:
        """The finished rollouts that ended before a Unix time, belong to a step up to `step` and are in one of `states`
        (None: any), with traffic that could be removed."""
        found = self._guard(lambda: prune.find(self._reader(), before=before, step=step, states=states))
        return Pruned(found.rollouts, found.spared)

    def with_traffic(
        self, *, before: float | None = None, step: int | None = None, states: Collection[str] | None = None
    ) -> Pruned:
        """The same with those that are unfinished or that training needs: what was said in them, it does not need."""
        reader = self._reader()
        found = self._guard(lambda: prune.find(reader, before=before, step=step, states=states, unfinished=True))
        return Pruned([*found.rollouts, *found.spared], [])

    async def remove_traffic(self, pruned: Pruned) -> None:
        """Remove the calls and samples of these rollouts and what was said in them; adds up `calls` and `messages`."""
        for start in range(0, len(pruned.rollouts), AT_ONCE):
            counted = [self.rollout(rollout_id) for rollout_id in pruned.rollouts[start : start + AT_ONCE]]
            pruned.calls += await self._write(lambda db, counted=counted: prune.remove_traffic(db, counted))
        pruned.messages += await self._remove_unused_messages()

    async def remove_text(self, pruned: Pruned) -> None:
        """Remove what was said in the calls of these rollouts, and keep their tokens and numbers."""
        for start in range(0, len(pruned.rollouts), AT_ONCE):
            part = pruned.rollouts[start : start + AT_ONCE]
            pruned.calls += await self._write(lambda db, part=part: prune.remove_text(db, part))
        pruned.messages += await self._remove_unused_messages()

    async def _remove_unused_messages(self) -> int:
        unused, newest = await asyncio.to_thread(self._guard, lambda: prune.unused_messages(self._reader()))
        if not unused:
            return 0
        return await self._write(lambda db: prune.remove_messages(db, unused, newest))

    async def mask(self, redactor: Redactor) -> dict[str, int]:
        """Mask the texts that are stored already, all in one commit; returns how many rows of each table changed."""

        def write(db: sqlite3.Connection) -> dict[str, int]:
            changed = mask_stored(db, redactor)
            db.execute("REPLACE INTO meta (key, value) VALUES ('masked_at', ?)", (str(time.time()),))
            return changed

        return await self._write(write)

    def flush_log(self) -> bool:
        """Empty the write-ahead log, so that nothing removed is left in it; False if a reader was in the way."""
        return self._guard(lambda: db.flush_log(self.path))

    def check(self) -> list[str]:
        """What is wrong with the file and with what is in it, at most MOST_PROBLEMS sentences; empty when it is whole.
        Reads all of it, as it was at one moment."""

        def read() -> list[str]:
            reader = self._reader()
            reader.execute("BEGIN")
            try:
                found = db.check(reader)
                if not found:
                    for problem in invariants.broken(reader):
                        found.append(problem)
                        if len(found) >= MOST_PROBLEMS:
                            break
                return found
            finally:
                reader.execute("ROLLBACK")

        return self._guard(read)

    def unused_messages(self) -> int:
        """How many messages no call has."""
        return len(self._guard(lambda: prune.unused_messages(self._reader()))[0])
