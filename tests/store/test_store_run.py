"""The run's own record: steps, versions, checkpoints, evaluations, phases, events, and going back."""

from __future__ import annotations

import sqlite3

import pytest
from making_calls import a_call, a_rollout

from aglite.errors import StoreError
from aglite.store import SampleRecord, Store


async def test_events_are_read_by_cursor(store: Store) -> None:
    assert store.last_event_id() == 0
    first = await store.add_event("info", "run", "one", {"n": 1})
    for text in ("two", "three"):
        await store.add_event("warning", "step", text)
    assert [event["text"] for event in store.events(after=first)] == ["two", "three"]
    assert [event["text"] for event in store.events(limit=2)] == ["one", "two"]
    event = store.events()[0]
    assert list(event) == ["id", "at", "level", "kind", "text", "data"] and event["data"] == {"n": 1}
    assert store.events(after=store.last_event_id()) == []


async def test_a_phase_ends_when_the_next_begins(store: Store) -> None:
    for phase in ("starting", "rollout", "training"):
        await store.set_phase(phase, f"why {phase}")
    phases = store.phases()
    assert (phases[0]["phase"], phases[0]["cause"]) == ("starting", "why starting")
    assert phases[0]["finished_at"] == phases[1]["started_at"]
    assert phases[-1]["finished_at"] is None
    assert [row["phase"] for row in store.phases(limit=2)] == ["rollout", "training"]


async def test_evaluations_and_checkpoints(store: Store) -> None:
    first = await store.start_evaluation(0, 0)
    second = await store.start_evaluation(5, 5, "val")
    await store.finish_evaluation(first, "done", {"mean": 0.5})
    rows = store.evaluations()
    assert [(row["id"], row["step"], row["state"], row["result"]) for row in rows] == [
        (first, 0, "done", {"mean": 0.5}),
        (second, 5, "running", {}),
    ]
    await store.add_checkpoint(5, 5, "checkpoints/step-5")
    await store.set_checkpoint_state(5, "removed")
    assert [(row["step"], row["state"], row["path"]) for row in store.checkpoints()] == [
        (5, "removed", "checkpoints/step-5")
    ]
    await store.add_checkpoint(6, 6, "checkpoints/step-6")
    await store.add_checkpoint(6, 6, "checkpoints/step-6")
    assert [row["state"] for row in store.checkpoints()] == ["removed", "removed", "kept"], "one folder, one checkpoint"
    with pytest.raises(StoreError, match="no checkpoint of step 9"):
        await store.set_checkpoint_state(9, "removed")


async def test_a_step_is_recorded_whole_or_not_at_all(store: Store) -> None:
    await a_rollout(store)
    call = await store.add_call(a_call())
    good = SampleRecord("r-1", [(call, True)], 5, 2, 1.0, 0.5)
    bad = SampleRecord("r-none", [(call, True)], 5, 2, 1.0, 0.5)
    fates, groups = {"r-1": "trained"}, ["g-1"]
    with pytest.raises(StoreError):
        await store.add_step(1, 1, "applied", {}, 0, 1, samples=[good, bad], fates=fates, groups=groups)
    assert store.steps() == [] and store.samples() == [] and store.policy_versions() == []
    assert store.group_rollouts("g-1")[0]["fate"] == "" and store.groups()[0]["state"] == "open"
    await store.add_step(1, 1, "applied", {"reward_mean": 0.5}, 0, 1, samples=[good], fates=fates, groups=groups)
    (step,) = store.steps()
    assert (step["step"], step["version"], step["state"], step["metrics"]) == (1, 1, "applied", {"reward_mean": 0.5})
    assert [row["version"] for row in store.policy_versions()] == [1]
    assert len(store.samples(step=1)) == 1
    assert store.group_rollouts("g-1")[0]["fate"] == "trained"
    assert (store.groups()[0]["state"], store.groups()[0]["step"]) == ("trained", 1)


async def test_a_skipped_step_makes_no_version(store: Store) -> None:
    await store.add_step(1, 0, "skipped", {}, 0, 1)
    assert store.policy_versions() == [] and store.next_version() == 1


async def test_version_numbers_are_never_used_again(store: Store) -> None:
    assert store.next_version() == 1
    for step in (1, 2, 3):
        version = store.next_version()
        assert version == step
        await store.add_step(step, version, "applied", {}, 0, 1)
    await store.roll_back(1)
    assert store.next_version() == 4
    await a_rollout(store)
    await store.add_call(a_call(versions=[[6, 2]]))
    assert store.next_version() == 7, "a version that sampled tokens is used, however little was recorded of it"


async def crashed_run(store: Store) -> None:
    """Checkpoint of version 1 at step 2 (step 2 was skipped), then two more steps, then nothing."""
    await store.add_step(1, 1, "applied", {}, 0, 1)
    await store.add_step(2, 1, "skipped", {}, 1, 2)
    await store.add_checkpoint(2, 1, "checkpoints/step-2")
    plan = {  # rollout: (group, state, version that sampled it, step that trained it)
        "r-old": ("g-old", "done", 0, 1),
        "r-kept-done": ("g-kept", "done", 1, 3),
        "r-kept-running": ("g-kept", "running", 1, None),
        "r-kept-newer": ("g-kept", "running", 2, None),
        "r-lost-done": ("g-lost", "done", 1, None),
        "r-lost-running": ("g-lost", "running", 1, None),
        "r-new": ("g-new", "done", 2, 4),
    }
    for name, (group, state, version, _) in plan.items():
        await a_rollout(store, name, group)
        call = await store.add_call(a_call(name, versions=[[version, 2]]))
        if state != "running":
            await store.set_rollout_state(name, state, reward=1.0)
        if name in ("r-old", "r-kept-done", "r-new"):
            step = plan[name][3]
            await store.add_samples(step, [SampleRecord(name, [(call, True)], 5, 2, 1.0, 0.5)])
            await store.update_rollout(name, step=step, fate="trained")
    await store.update_group("g-old", state="trained", step=1)
    await store.update_group("g-kept", state="trained", step=3)
    await store.update_group("g-new", state="trained", step=4)
    await store.start_evaluation(2, 1)
    await store.finish_evaluation(await store.start_evaluation(3, 2), "done", {"mean": 1.0})
    await store.add_step(3, 2, "applied", {}, 2, 3)
    await store.add_step(4, 3, "applied", {}, 3, 4)
    await store.add_checkpoint(4, 3, "checkpoints/step-4")


async def test_going_back_marks_what_came_after_and_keeps_it_readable(store: Store) -> None:
    await crashed_run(store)
    counts = await store.roll_back(1, keep_groups=["g-kept"])
    assert counts["steps"] == 2 and counts["policy_versions"] == 2 and counts["checkpoints"] == 1
    assert [row["state"] for row in store.steps()] == ["applied", "skipped", "rolled_back", "rolled_back"]
    assert [row["state"] for row in store.policy_versions()] == ["live", "rolled_back", "rolled_back"]
    assert [row["state"] for row in store.checkpoints()] == ["kept", "rolled_back"]
    assert [row["state"] for row in store.evaluations()] == ["abandoned", "rolled_back"]
    assert {group["id"]: group["state"] for group in store.groups()} == {
        "g-old": "trained",
        "g-kept": "open",
        "g-lost": "rolled_back",
        "g-new": "rolled_back",
    }
    found = {row["id"]: row for group in store.groups() for row in store.group_rollouts(group["id"])}
    assert {name: (row["state"], row["fate"], row["step"]) for name, row in found.items()} == {
        "r-old": ("done", "trained", 1),
        "r-kept-done": ("done", "", None),
        "r-kept-running": ("running", "", None),
        "r-kept-newer": ("running", "rolled_back", None),
        "r-lost-done": ("done", "", None),
        "r-lost-running": ("cancelled", "", None),
        "r-new": ("done", "rolled_back", None),
    }
    assert store.rollout_states("r-lost-running")[-1]["state"] == "cancelled"
    assert "rolled_back" in store.rollout("r-new")["flags"]
    assert [sample.rollout_id for sample in store.samples()] == ["r-old"]
    assert len(store.samples(rolled_back=True)) == 3
    assert len(store.calls("r-new")) == 1
    assert store.check() == []


async def test_a_skipped_step_past_the_checkpoint_is_taken_back_too(store: Store) -> None:
    await store.add_step(1, 1, "applied", {}, 0, 1)
    await store.add_checkpoint(1, 1, "checkpoints/step-1")
    await store.add_step(2, 1, "skipped", {}, 1, 2)
    await store.roll_back(1)
    assert [row["state"] for row in store.steps()] == ["applied", "rolled_back"]
    assert [row["state"] for row in store.checkpoints()] == ["kept"]


async def test_steps_go_on_with_their_old_numbers_after_going_back(store: Store) -> None:
    await crashed_run(store)
    await store.roll_back(1, keep_groups=["g-kept"])
    call = store.calls("r-kept-done")[0]
    version = store.next_version()
    assert version == 4
    await store.add_step(
        3,
        version,
        "applied",
        {},
        5,
        6,
        samples=[SampleRecord("r-kept-done", [(call.id, True)], 5, 2, 0.5, 0.5)],
        fates={"r-kept-done": "trained"},
        groups=["g-kept"],
    )
    await store.add_checkpoint(3, version, "checkpoints/step-3")
    assert [(row["step"], row["state"]) for row in store.steps()][-3:] == [
        (3, "rolled_back"),
        (4, "rolled_back"),
        (3, "applied"),
    ]
    assert [sample.advantage for sample in store.samples(step=3)] == [0.5]
    assert store.rollout("r-kept-done")["samples"] == 1
    # Going back again, to the new checkpoint, changes nothing of what it holds.
    counts = await store.roll_back(version)
    assert counts["steps"] == counts["rollouts"] == counts["policy_versions"] == 0
    assert store.rollout("r-kept-done")["trained_tokens"] == 2


async def test_only_the_store_knows_sql_but_any_tool_can_read(store: Store) -> None:
    await crashed_run(store)
    with sqlite3.connect(f"file:{store.path}?mode=ro", uri=True) as other:
        assert other.execute("SELECT count(*) FROM rollouts").fetchone()[0] == 7
