"""Groups taken up by a later process: how many rollouts they still need."""

import asyncio

import pytest

from aglite.config import Recipe
from aglite.rollouts.outcome import Outcome
from aglite.store import Store
from aglite.training.groups import Groups

RECIPE = Recipe.model_validate(
    {
        "name": "groups",
        "model": "m",
        "tasks": {"train": "t", "val": "t"},
        "agent": {"command": ["x"]},
        "reward": {"grade": "grade.py:grade"},
        "algorithm": {"group_size": 2, "max_refills": 1},
    }
)
TASK = {"id": "t", "public": {}, "hidden": {}}


class Done:
    """A launcher whose rollouts all end well at once."""

    def __init__(self):
        self.launched = []

    def submit(self, rollout_id, task, split, seed=None):
        self.launched.append(rollout_id)

        async def outcome():
            return Outcome("done", "", 1.0)

        return asyncio.create_task(outcome())


@pytest.fixture
def store(tmp_path):
    opened = Store.open(tmp_path / "aglite.db")
    yield opened
    opened.close()


async def restored(store, members, *, refills=0):
    """A group of two whose rollouts had got this far, taken up again: the group and what is launched for it."""
    await store.add_group("g", "t", "train", 2)
    await store.update_group("g", refills=refills)
    for number, (state, cause) in enumerate(members):
        await store.add_rollout(f"r{number}", "t", "g", "train", "local")
        reward = 0.5 if state in ("done", "failed") else None
        await store.set_rollout_state(f"r{number}", state, cause, 1, reward=reward)
    launcher = Done()
    groups = Groups(store, launcher, RECIPE, smallest=2)
    group = await groups.restore(store.groups()[0], TASK)
    await groups.drain()
    return groups, group, launcher.launched


async def test_a_refilled_group_is_not_refilled_again(store):
    groups, group, launched = await restored(
        store, [("error", "grader: x"), ("done", ""), ("queued", "run stopped")], refills=1
    )
    assert launched == ["r2"]
    assert len(group.rewards()) == 2 and list(groups.complete) == [group]


async def test_a_member_lost_just_before_the_end_is_made_good(store):
    _, group, launched = await restored(store, [("error", "launch: x"), ("done", "")])
    assert len(launched) == 1 and launched[0] not in ("r0", "r1")
    assert len(group.rewards()) == 2


async def test_a_complete_group_stays_complete(store):
    groups, group, launched = await restored(store, [("done", ""), ("failed", "exit: code 1")])
    assert launched == [] and list(groups.complete) == [group]


async def test_what_a_person_killed_stays_killed_what_the_end_cancelled_goes_on(store):
    groups, group, launched = await restored(store, [("cancelled", "stopped"), ("cancelled", "killed")])
    assert launched == ["r0"]
    assert not groups.complete and groups.dropped == 1
    assert group.members["r1"].state == "cancelled"


async def test_the_end_of_the_run_drops_no_group(store):
    class Ending(Done):
        def submit(self, rollout_id, task, split, seed=None):
            async def outcome():
                return Outcome("cancelled", "stopped", None)

            return asyncio.create_task(outcome())

    groups = Groups(store, Ending(), RECIPE, smallest=2)
    group = await groups.start(TASK, "train", 2, version=0)
    await groups.drain()
    assert groups.dropped == 0 and list(groups.open) == [group.id]
    assert store.groups()[0]["state"] == "open"
