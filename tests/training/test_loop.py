"""What the loop tells of its pace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aglite.config import Recipe
from aglite.phases import PhaseMachine
from aglite.store import Store
from aglite.training.loop import TrainingLoop

RECIPE = Recipe.model_validate(
    {
        "name": "loop",
        "model": "m",
        "tasks": {"train": "t", "val": "t"},
        "agent": {"backend": "external"},
        "trainer": {"steps": 6, "checkpoint_every": 9},
    }
)


async def test_the_time_left_is_told_by_the_step_though_an_update_makes_several(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "aglite.db")
    runtime: Any = SimpleNamespace(recipe=RECIPE, store=store, launcher=None)
    loop = TrainingLoop(runtime, PhaseMachine(store), [{"id": "t", "public": {}}], [])
    loop.phases.current = "rollout"
    told = []

    async def update(_: Any) -> None:
        if loop.state.step:
            told.append(loop.eta_s())
            loop.stop()
        began = time.monotonic()
        await asyncio.sleep(0.3)
        loop.state.step += 2
        told.append(time.monotonic() - began)

    async def collect() -> Any:
        return "groups"

    loop._update, loop._collect = update, collect  # type: ignore[method-assign]
    assert loop.eta_s() is None
    await loop.run()
    store.close()
    of_two, left, _ = told
    assert left == pytest.approx(4 * of_two / 2, rel=0.3)
