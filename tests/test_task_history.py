"""Pass rates over time."""

from __future__ import annotations

from pathlib import Path

from aglite.store import Store
from aglite.task_history import table, task_history


def row(task: str, group: str, step: int | None, reward: float) -> dict:
    return {"task_id": task, "group_id": group, "step": step, "reward": reward}


ROWS = [
    row("a", "g1", 1, 0.0),
    row("b", "g2", 1, 1.0),
    row("a", "g1", 1, 0.5),
    row("a", "g3", 2, 1.0),
    row("a", "g3", 2, 0.0),
    row("a", "g4", None, 1.0),
]


def test_tasks_by_group() -> None:
    a, b = task_history(ROWS)
    assert (a["task_id"], a["rollouts"], a["solved"], a["mean"]) == ("a", 5, 0.4, 0.5)
    assert [(group["step"], group["n"], group["solved"]) for group in a["over_time"]] == [
        (1, 2, 0.0),
        (2, 2, 0.5),
        (None, 1, 1.0),
    ]
    assert b["over_time"] == [{"step": 1, "n": 1, "solved": 1.0, "mean": 1.0}]


def test_the_table() -> None:
    lines = list(table(task_history(ROWS), ["b"]))
    assert lines[1].split() == ["a", "3", "5", "40%", "0%", "100%", "▁▅█"]
    assert lines[2].split() == ["b", "1", "1", "100%", "100%", "100%", "█", "rests"]
    assert list(table([], [])) == ["no rewards yet"]


async def test_rewards_of_whole_groups_from_the_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "aglite.db")
    evaluation = await store.start_evaluation(7, 3)
    for group, split, eval_id, state in (
        ("g1", "train", None, "complete"),
        ("g2", "train", None, "open"),
        ("g3", "train", None, "dropped"),
        ("g4", "val", evaluation, "complete"),
    ):
        await store.add_group(group, "t", split, 2, eval_id=eval_id)
        for number in range(2):
            name = f"{group}-{number}"
            await store.add_rollout(name, "t", group, split, "local")
            await store.set_rollout_state(name, "done", reward=number / 2)
        await store.update_group(group, state=state)
    await store.set_rollout_state("g1-1", "error", "launch", reward=None)
    assert store.task_rewards("val") == [], "the evaluation goes on"
    await store.finish_evaluation(evaluation, "done", {})
    assert store.task_rewards("train") == [{"task_id": "t", "group_id": "g1", "step": None, "reward": 0.0}]
    await store.add_step(4, 4, "applied", {}, 0, 1, fates={"g1-0": "trained"}, groups=["g1"])
    assert [row["step"] for row in store.task_rewards("train")] == [4]
    assert [(row["step"], row["reward"]) for row in store.task_rewards("val")] == [(7, 0.0), (7, 0.5)]
    store.close()
