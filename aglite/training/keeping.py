"""Which checkpoints are kept: the last few, and the one that did best in validation."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from aglite.store import Store
from aglite.training.scores import best, comparable


async def tidy(store: Store, run_dir: Path, keep_last: int) -> None:
    """Note in the store which checkpoint is the best, and remove all but it and the last `keep_last`.

    The best is the one whose policy had the highest validation reward among evaluations that can be compared; while
    none of these is a checkpoint's, it stays the one that it was.
    """
    kept = sorted((row for row in store.checkpoints() if row["state"] == "kept"), key=lambda row: row["step"])
    steps = {row["step"] for row in kept}
    top = best(row for row in comparable(store.evaluations()) if row["step"] in steps)
    if top is not None:
        await store.set_best_checkpoint(top["step"])
    step_of_best = top["step"] if top else next((row["step"] for row in kept if row["best"]), None)
    for row in kept[:-keep_last]:
        if row["step"] != step_of_best:
            await asyncio.to_thread(shutil.rmtree, run_dir / row["path"], True)
            await store.set_checkpoint_state(row["step"], "removed")
