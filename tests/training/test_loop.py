"""What the loop tells of its pace, and that it hears what happens while it is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aglite.config import Recipe
from aglite.paths import RunDir
from aglite.phases import PhaseMachine
from aglite.store import Store
from aglite.training.groups import Group
from aglite.training.loop import TrainingLoop

RECIPE = Recipe.model_validate(
    {
        "name": "loop",
        "model": "m",
        "tasks": {"train": "t", "val": "t"},
        "agent": {"backend": "external"},
        "algorithm": {"groups_per_step": 2},
        "trainer": {"steps": 6, "checkpoint_every": 9, "min_free_disk_mb": 0},
    }
)
TASK = {"id": "t", "public": {}}


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingLoop]:
    """One whose worker, gateway and launcher do nothing, and that looks around by itself once a minute only."""
    for module in ("loop", "pauses"):
        monkeypatch.setattr(f"aglite.training.{module}.DISK_POLL_S", 60)

    async def nothing(*_: Any) -> None: ...

    store = Store.open(tmp_path / "aglite.db")
    gate = SimpleNamespace(close=lambda: None, open=lambda: None)
    runtime: Any = SimpleNamespace(
        recipe=RECIPE,
        store=store,
        launcher=None,
        run_dir=RunDir(tmp_path),
        gateway=SimpleNamespace(gate=gate),
        worker=SimpleNamespace(preempt=nothing, resume=nothing),
    )
    made = TrainingLoop(runtime, PhaseMachine(store), [TASK], [])
    made.phases.current = "rollout"
    yield made
    store.close()


async def test_a_group_that_completes_while_others_are_started_is_not_overlooked(loop: TrainingLoop) -> None:
    fills = []

    async def fill() -> None:
        fills.append(1)
        if len(fills) == 2:  # after it was found that there are too few
            loop.groups.complete.extend(Group(name, TASK, "train", 0, 0) for name in "ab")
            loop.groups.changed.set()

    loop._fill = fill  # type: ignore[method-assign]
    taken = await asyncio.wait_for(loop._collect(), 10)
    assert taken is not None and [group.id for group in taken.trained] == ["a", "b"]


async def test_what_is_asked_for_while_groups_are_started_is_heard(loop: TrainingLoop) -> None:
    async def fill() -> None:
        loop.stop()

    loop._fill = fill  # type: ignore[method-assign]
    assert await asyncio.wait_for(loop._collect(), 10) is None


async def test_a_pause_that_ends_while_it_is_written_down_ends(loop: TrainingLoop) -> None:
    written = loop.store.set_phase

    async def set_phase(phase: str, cause: str) -> None:
        if phase == "paused":
            loop.resume()
        await written(phase, cause)

    loop.store.set_phase = set_phase  # type: ignore[method-assign]
    loop.pause("asked for")
    await asyncio.wait_for(loop._hold_if_wanted(), 10)
    assert loop.phases.current == "rollout" and not loop.paused


async def test_the_time_left_is_told_by_the_step_though_an_update_makes_several(
    loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, now = [], [1000.0]
    monkeypatch.setattr("aglite.training.loop.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def update(_: Any) -> None:
        if loop.state.step:
            told.append(loop.eta_s())
            loop.stop()
        now[0] += 30
        loop.state.step += 2

    async def collect() -> Any:
        return "groups"

    loop._update, loop._collect = update, collect  # type: ignore[method-assign]
    assert loop.eta_s() is None
    await loop.run()
    assert told == [pytest.approx(4 * 30 / 2)]
