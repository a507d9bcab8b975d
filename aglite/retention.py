"""Keeping no more of a run's traffic than its recipe says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection

from aglite.config import Retention
from aglite.errors import AgliteError, StoreError
from aglite.paths import RunDir
from aglite.store import Store
from aglite.store.upkeep import Pruned

DAY_S = 86400.0


async def remove(
    store: Store,
    run_dir: RunDir,
    *,
    before: float | None = None,
    step: int | None = None,
    states: Collection[str] | None = None,
    text_only: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove traffic of finished rollouts, or (`text_only`) of any rollout what was said and printed in it.

    `before` is a Unix time, `step` the last step, `states` the states of rollouts it is about; None: any. Rollouts that
    training still needs are spared and named in the result. Their logs go too.
    """
    select = store.with_traffic if text_only else store.prunable
    pruned = await asyncio.to_thread(select, before=before, step=step, states=states)
    if not dry_run and (pruned.rollouts or text_only):
        await (store.remove_text if text_only else store.remove_traffic)(pruned)
        await asyncio.to_thread(_remove_logs, run_dir, set(pruned.rollouts))
    return pruned


def _remove_logs(run_dir: RunDir, rollouts: set[str]) -> None:
    for log in (run_dir.logs / "rollouts").glob("*.log"):
        if log.name.split(".")[0] in rollouts:
            log.unlink(missing_ok=True)


class Keeper:
    """Holds a run to its recipe's `retention` while it goes on."""

    def __init__(self, store: Store, run_dir: RunDir, retention: Retention, *, every_s: float = DAY_S) -> None:
        self._store = store
        self._run_dir = run_dir
        self._retention = retention
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove what is not to be kept, now (before anything runs) and then once a day. Again after a restart."""
        await self.stop()
        if self._retention.traffic == "tokens":
            pruned = await remove(self._store, self._run_dir, text_only=True)
            await self._tell(pruned, "what was said in")
        if self._retention.days is not None:
            await self._prune(self._retention.days)
            self._task = asyncio.create_task(self._daily(self._retention.days))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _daily(self, days: int) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._prune(days)
            except AgliteError as error:  # such as a full disk: the run goes on, and so does the wish
                with contextlib.suppress(StoreError):
                    await self._store.add_event("error", "run", f"old traffic could not be removed: {error.message}")

    async def _prune(self, days: int) -> None:
        pruned = await remove(self._store, self._run_dir, before=time.time() - days * DAY_S)
        await self._tell(pruned, f"the traffic, older than {days} day{'s' * (days != 1)}, of")

    async def _tell(self, pruned: Pruned, what: str) -> None:
        if pruned.calls or pruned.messages:
            await asyncio.to_thread(self._store.flush_log)
            text = f"retention: removed {what} {len(pruned.rollouts)} rollouts ({pruned.calls} calls)"
            await self._store.add_event("info", "run", text)
