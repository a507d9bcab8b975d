"""Groups taken up by a later process: how many rollouts they still need."""

import asyncio

import pytest

from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.evaluation import Evaluation
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


async def test_a_group_is_open_until_it_is_written_down_as_complete(store, monkeypatch):
    """An evaluation is over when none is open: it must not miss the last one."""
    groups = Groups(store, Done(), RECIPE, smallest=1)
    writing, go_on = asyncio.Event(), asyncio.Event()
    update = store.update_group

    async def slow(group_id, **values):
        writing.set()
        await go_on.wait()
        await update(group_id, **values)

    monkeypatch.setattr(store, "update_group", slow)
    group = await groups.start(TASK, "val", 1, version=0)
    await writing.wait()
    assert list(groups.open) == [group.id] and not groups.complete
    assert not await groups.retry(next(iter(group.members)))
    go_on.set()
    await groups.drain()
    assert not groups.open and list(groups.complete) == [group]


async def test_a_group_waits_for_the_one_that_makes_good_a_lost_one(store, monkeypatch):
    """However long it takes to write down that one was lost, and however soon the others are done."""

    class OneLost(Done):
        def submit(self, rollout_id, task, split, seed=None):
            self.launched.append(rollout_id)
            number = len(self.launched)

            async def outcome():
                if number == 1:
                    return Outcome("error", "launch: x", None)
                await lost_is_known.wait()
                return Outcome("done", "", 1.0)

            return asyncio.create_task(outcome())

    lost_is_known = asyncio.Event()
    add_rollout, added = store.add_rollout, []

    async def slow(rollout_id, *values):
        added.append(rollout_id)
        if len(added) == 3:  # the one in its place
            lost_is_known.set()
            await asyncio.sleep(0.05)
        await add_rollout(rollout_id, *values)

    monkeypatch.setattr(store, "add_rollout", slow)
    launcher = OneLost()
    groups = Groups(store, launcher, RECIPE, smallest=2)
    group = await groups.start(TASK, "train", 2, version=0)
    async with asyncio.timeout(60):
        await groups.changed.wait()
    await groups.drain()
    assert len(launcher.launched) == 3 and len(group.rewards()) == 2 and list(groups.complete) == [group]


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


class ByHand:
    """A launcher whose rollouts end when the test says so."""

    def __init__(self, store):
        self.store = store
        self.submitted = []
        self.ends = {}

    def submit(self, rollout_id, task, split, seed=None):
        self.submitted.append((rollout_id, seed))
        self.ends[rollout_id] = asyncio.get_running_loop().create_future()

        async def outcome():
            return await self.ends[rollout_id]

        return asyncio.create_task(outcome())

    async def end(self, rollout_id, state, reward=None, cause=""):
        self.ends[rollout_id].set_result(Outcome(state, cause, reward))
        for _ in range(10):  # the store writes in order: what the group had handed in is written after this
            await asyncio.sleep(0.001)
            await self.store.set_meta("after", rollout_id)


async def test_a_rollout_is_retried_while_its_group_is_open(store):
    launcher = ByHand(store)
    groups = Groups(store, launcher, RECIPE, smallest=2)
    group = await groups.start(TASK, "train", 2, version=0, seed=70)
    first, second = group.members
    await store.set_rollout_state(first, "failed", "exit: code 1", 1, reward=0.0, flags=["ungraded"], exit_code=1)
    await launcher.end(first, "failed", 0.0)
    with pytest.raises(AgliteError, match="still running"):
        await groups.retry(second)
    assert await groups.retry(first)
    row = store.group_rollouts(group.id)[0]
    assert (row["state"], row["reward"], row["flags"], row["exit_code"]) == ("queued", None, [], None)
    assert launcher.submitted[-1] == (first, 70), "it samples with its own seed again"
    await launcher.end(second, "done", 1.0)
    assert group.id in groups.open, "the group waits for the new attempt"
    with pytest.raises(AgliteError, match="is done"):
        await groups.retry(second)
    await launcher.end(first, "done", 0.5)
    assert [one.id for one in groups.complete] == [group.id] and group.rewards() == [0.5, 1.0]
    assert not await groups.retry(first), "its group is complete"


async def completed(store, rewards, **algorithm):
    """Groups with these rewards, all complete."""
    settings = RECIPE.model_copy(update={"algorithm": RECIPE.algorithm.model_copy(update=algorithm)})
    launcher = ByHand(store)
    groups = Groups(store, launcher, settings, smallest=2)
    for each in rewards:
        group = await groups.start(TASK, "train", len(each), version=0)
        for rollout_id, reward in zip(list(group.members), each, strict=True):
            await launcher.end(rollout_id, "done", reward)
    return groups


def names(groups):
    return [group.rewards() for group in groups]


async def test_groups_that_teach_nothing_are_replaced_as_often_as_the_recipe_says(store):
    equal, unlike = [0.5, 0.5], [0.0, 1.0]
    groups = await completed(store, [equal, unlike, equal, equal, [0.2, 0.3]], dynamic_sampling=2)
    taken = groups.take(2)
    assert names(taken.trained) == [unlike, equal] and names(taken.set_aside) == [equal, equal]
    assert len(taken.all) == 4
    # the next step may set aside as many again
    assert groups.take(2) is None and not groups.set_aside and names(groups.complete) == [[0.2, 0.3]]


async def test_what_is_set_aside_waits_for_its_step(store):
    equal = [1.0, 1.0]
    groups = await completed(store, [equal, [0.0, 1.0]], dynamic_sampling=1)
    assert groups.take(2) is None
    assert names(groups.set_aside) == [equal] and names(groups.complete) == [[0.0, 1.0]]
    assert groups.take(2) is None and len(groups.set_aside) == 1
    assert names(groups.take(1).set_aside) == [equal] and not groups.set_aside


async def test_by_default_the_oldest_groups_are_taken_as_they_are(store):
    groups = await completed(store, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    taken = groups.take(2)
    assert names(taken.trained) == [[1.0, 1.0], [0.0, 0.0]] and not taken.set_aside


async def test_an_evaluation_whose_rollouts_all_fail_does_not_wait_for_the_last_one(store):
    class AllButOneFail(Done):
        def submit(self, rollout_id, task, split, seed=None):
            async def outcome():
                if task["id"] == "t11":
                    await asyncio.Event().wait()
                return Outcome("error", "launch: no room", None)

            return asyncio.create_task(outcome())

    tasks = [{**TASK, "id": f"t{number}"} for number in range(12)]
    evaluation = Evaluation(store, AllButOneFail(), RECIPE, tasks)
    with pytest.raises(AgliteError, match="all failed by infrastructure: launch: no room"):
        await asyncio.wait_for(evaluation.run(step=0, version=0), 60)
    assert [row["state"] for row in store.evaluations()] == ["abandoned"]


async def test_a_group_that_goes_on_short_is_logged(store):
    groups, group, _ = await restored(store, [("done", ""), ("done", ""), ("error", "launch: x")], refills=1)
    assert list(groups.complete) == [group] and not store.events()
    settings = RECIPE.model_copy(update={"algorithm": RECIPE.algorithm.model_copy(update={"max_refills": 0})})
    launcher = ByHand(store)
    others = Groups(store, launcher, settings, smallest=2)
    short = await others.start(TASK, "train", 3, version=0)
    for rollout_id, state in zip(list(short.members), ("done", "error", "done"), strict=True):
        await launcher.end(rollout_id, state, 1.0 if state == "done" else None, "launch: x")
    assert list(others.complete) == [short]
    (event,) = store.events()
    assert "goes on with 2 of 3 rollouts" in event["text"] and event["level"] == "warning"
