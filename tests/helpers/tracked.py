"""Steps and evaluations for tests of trackers."""

from __future__ import annotations

from aglite.store import Store


def step(store: Store, number: int, reward: float, **metrics: object) -> None:
    """Add an applied step; it ends at 1000 seconds for each of its number."""
    values = {"reward_mean": reward, "forks": {"edited": number}, **metrics}
    version = store.next_version()
    store.sync(store.add_step(number, version, "applied", values, 1000.0 * number - 10, 1000.0 * number))


def evaluation(store: Store, number: int, mean: float) -> None:
    version = max((row["version"] for row in store.steps() if row["step"] <= number), default=0)
    row = store.sync(store.start_evaluation(number, version))
    result = {"mean": mean, "n": 4, "pass@1": {"mean": mean, "low": 0.0, "high": 1.0}, "by_kind": {"word": mean}}
    store.sync(store.finish_evaluation(row, "done", result))


def roll_back(store: Store, step: int) -> None:
    """Take back all after `step`."""
    store.sync(store.roll_back(next((row["version"] for row in store.steps() if row["step"] == step), 0)))
