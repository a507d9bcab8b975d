"""Which checkpoints stay on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from aglite.store import Store
from aglite.training.keeping import tidy


@pytest.fixture
def store(tmp_path: Path):
    opened = Store.open(tmp_path / "aglite.db")
    yield opened
    opened.close()


async def evaluated(store: Store, step: int, mean: float, n: int = 4) -> None:
    number = await store.start_evaluation(step, step)
    await store.finish_evaluation(number, "done", {"mean": mean, "n": n})


async def checkpoint(store: Store, folder: Path, step: int) -> None:
    (folder / f"checkpoints/step-{step}").mkdir(parents=True)
    await store.add_checkpoint(step, step, f"checkpoints/step-{step}")


def on_disk(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in (folder / "checkpoints").iterdir()}


def best(store: Store) -> list[int]:
    return [row["step"] for row in store.checkpoints() if row["best"]]


async def test_the_best_stays_however_old(store: Store, tmp_path: Path) -> None:
    await evaluated(store, 0, 0.95)  # the model that the run began with is no checkpoint
    for step, mean in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5)):
        await checkpoint(store, tmp_path, step)
        await evaluated(store, step, mean)
        await tidy(store, tmp_path, keep_last=1)
    assert on_disk(tmp_path) == {2, 4} and best(store) == [2]
    assert [row["step"] for row in store.checkpoints() if row["state"] == "removed"] == [1, 3]
    await checkpoint(store, tmp_path, 5)
    await evaluated(store, 5, 0.91)
    await tidy(store, tmp_path, keep_last=2)
    assert on_disk(tmp_path) == {4, 5} and best(store) == [5]


async def test_other_evaluations_do_not_dethrone_it(store: Store, tmp_path: Path) -> None:
    for step, mean in ((1, 0.9), (2, 0.1)):
        await checkpoint(store, tmp_path, step)
        await evaluated(store, step, mean)
    await tidy(store, tmp_path, keep_last=1)
    await checkpoint(store, tmp_path, 3)
    await evaluated(store, 4, 0.3, n=64)  # of a step without a checkpoint, on other tasks
    await tidy(store, tmp_path, keep_last=1)
    assert on_disk(tmp_path) == {1, 3} and best(store) == [1]
    await checkpoint(store, tmp_path, 5)
    await evaluated(store, 5, 0.2, n=64)  # the first that can be compared with what is measured now
    await tidy(store, tmp_path, keep_last=1)
    assert on_disk(tmp_path) == {5} and best(store) == [5]


async def test_what_is_rolled_back_is_not_the_best(store: Store, tmp_path: Path) -> None:
    for step, mean in ((1, 0.2), (2, 0.9)):
        await checkpoint(store, tmp_path, step)
        await evaluated(store, step, mean)
    await tidy(store, tmp_path, keep_last=2)
    assert best(store) == [2]
    await store.roll_back(1)
    assert best(store) == []
    await tidy(store, tmp_path, keep_last=2)
    assert best(store) == [1]
