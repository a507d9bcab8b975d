"""Traffic that is old goes by itself, at the start and later, and with it its log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from recorded_run import DONE, FAILED, SECOND, WAITING, recorded_run

from aglite.config import Retention
from aglite.retention import DAY_S, Keeper, remove
from aglite.store import Store


@pytest.fixture
def aged(tmp_path: Path):
    """A finished run of three days ago: its one trained step is before its last checkpoint."""
    run = recorded_run(tmp_path / "run", now=time.time() - 3 * DAY_S)
    store = Store.open(run.db)
    yield run, store
    store.close()


async def test_at_the_start_and_then_daily(aged) -> None:
    run, store = aged
    kept = Keeper(store, run, Retention(days=7), every_s=0.05)
    await kept.start()
    assert store.calls(DONE) and run.rollout_log(DONE, 1).exists()
    await kept.stop()

    await store.update_group("g-1", state="trained", step=1)
    keeper = Keeper(store, run, Retention(days=2), every_s=0.05)
    await keeper.start()
    assert store.calls(DONE) == [] and not run.rollout_log(DONE, 1).exists()
    row = store.rollout(DONE)
    assert (row["calls"], row["samples"], row["trained_tokens"]) == (2, 1, 3) and "pruned" in row["flags"]
    # its group waits to be trained, and so does a rollout that has not begun
    assert "pruned" not in store.rollout(FAILED)["flags"] + store.rollout(WAITING)["flags"]
    texts = [event["text"] for event in store.events()]
    assert "retention: removed the traffic, older than 2 days, of 2 rollouts (3 calls)" in texts

    await store.update_group("g-2", state="dropped")  # and what becomes useless later goes on a later day
    async with asyncio.timeout(120):
        while "pruned" not in store.rollout(FAILED)["flags"]:  # noqa: ASYNC110 (the store has no event for it)
            await asyncio.sleep(0.02)
    await keeper.stop()
    assert store.check() == []


async def test_a_disk_that_is_full_for_a_day_ends_nothing(aged, monkeypatch: pytest.MonkeyPatch) -> None:
    from aglite import retention
    from aglite.errors import StoreError

    run, store = aged
    tries = []

    async def full(*_, **__):
        tries.append(1)
        if len(tries) == 2:
            raise StoreError("the disk is full")
        return store.prunable(states=[])

    monkeypatch.setattr(retention, "remove", full)
    keeper = Keeper(store, run, Retention(days=2), every_s=0.02)
    await keeper.start()
    async with asyncio.timeout(120):
        while len(tries) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await keeper.stop()
    assert "old traffic could not be removed: the disk is full" in [event["text"] for event in store.events()]


async def test_text_goes_from_unfinished_rollouts_too(aged) -> None:
    run, store = aged
    before = [call.json() for call in store.calls(DONE)]
    removed = await remove(store, run, text_only=True)
    assert set(removed.rollouts) == {DONE, SECOND, FAILED, WAITING} and removed.calls == 3
    assert [call.json() for call in store.calls(DONE)] == before and store.messages(store.calls(DONE)[1]) == []
    assert not run.rollout_log(DONE, 1).exists() and store.check() == []
    again = await remove(store, run, text_only=True)
    assert (again.calls, again.messages) == (0, 0)
