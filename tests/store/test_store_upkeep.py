"""Pruning, masking and checking a store: what goes is gone, what stays is whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making_calls import a_call, a_rollout

from aglite.redact import MARK, NAMED, Redactor
from aglite.store import SampleRecord, Store
from aglite.store.db import vacuum
from aglite.training.samples import build_samples

EMAILS = Redactor([NAMED["emails"]])


def files(path: Path) -> bytes:
    """All that is on disk of a database."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


async def fill(store: Store, seed: int, rollouts: int = 4) -> None:
    """A run of some trained and some other rollouts, their conversations branching at random."""
    rng = random.Random(seed)
    await store.add_tasks("train", [{"id": "t", "public": {"ask": "of task@mail.example"}, "hidden": {}}])
    await store.set_meta("manifest", {"recipe": {}})
    for step in (1, 2):
        fates, groups, samples = {}, [], []
        for number in range(rollouts // 2):
            rollout_id, group_id = f"r-{step}{number}", f"g-{step}{number}"
            await store.add_group(group_id, "t", "train", 1)
            await store.add_rollout(rollout_id, "t", group_id, "train", "local")
            await store.set_rollout_state(rollout_id, "running", attempt=1)
            await _calls(store, rollout_id, rng, step)
            state = rng.choice(["done", "failed"])
            cause = "exit: code 1: cause@mail.example" if state == "failed" else ""
            await store.set_rollout_state(rollout_id, state, cause=cause, reward=1.0, finished_at=float(step * 100))
            for sample in build_samples(store.calls(rollout_id)):
                trained = sum(sample.loss_mask)
                samples.append(SampleRecord(rollout_id, sample.calls, len(sample.input_ids), trained, 0.5, 0.1))
            fates[rollout_id] = "trained"
            groups.append(group_id)
        await store.add_step(step, step, "applied", {}, 0, 1, samples=samples, fates=fates, groups=groups)
        await store.add_checkpoint(step, step, f"checkpoints/step-{step}")


async def _calls(store: Store, rollout_id: str, rng: random.Random, version: int) -> None:
    names = ("jane", "joe", f"id-{rng.random()}")
    said = ["hi", "write to jane@mail.example", *(f"{name}@mail.example" for name in names)]
    done: list[tuple[int, int, int]] = []
    for number in range(rng.randint(1, 5)):
        new = [rng.randrange(50) for _ in range(rng.randint(1, 4))]
        response = [rng.randrange(50) for _ in range(rng.randint(1, 4))]
        fields: dict[str, Any] = {}
        if done and rng.random() < 0.7:
            base_id, tokens, messages = rng.choice(done)
            fields = {"base_id": base_id, "base_len": tokens, "base_messages": messages, "parent_id": base_id}
        messages = [{"role": "user", "content": rng.choice(said)} for _ in range(rng.randint(1, 2))]
        call = a_call(
            rollout_id,
            new,
            response,
            versions=[[version, len(response)]],
            new_messages=messages,
            reply_message={"role": "assistant", "content": rng.choice(said)},
            request={"asked": {"stop": ["stop@mail.example"], "temperature": 0.5}, "used": {"max_tokens": 3}},
            started_at=float(number),
            error="the engine failed: error@mail.example" if rng.random() < 0.1 else "",
            **fields,
        )
        call_id = await store.add_call(call)
        done.append((call_id, call.prompt_len + len(response), fields.get("base_messages", 0) + len(messages) + 1))


@contextlib.contextmanager
def a_store(seed: int, **options: Any) -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "aglite.db", **options)
        try:
            asyncio.run(fill(store, seed))
            yield store
        finally:
            store.close()


def tokens(store: Store) -> dict[str, Any]:
    """Every number of every call and sample, as it is trained and exported."""
    return {
        row["id"]: (
            [call.json() for call in store.calls(row["id"])],
            [sample.json() for sample in store.samples(rollout_id=row["id"])],
        )
        for row in store.rollouts()
    }


seeds = st.integers(0, 10_000)


@settings(max_examples=15)
@given(seeds)
def test_masking_changes_text_and_no_token(seed: int) -> None:
    with a_store(seed) as store:
        before, listed = tokens(store), store.rollouts()
        conversations = {row["id"]: store.conversations(row["id"]) for row in listed}
        assert b"@mail.example" in files(store.path)
        asyncio.run(store.mask(EMAILS))
        assert store.check() == [] and store.unused_messages() == 0
        assert tokens(store) == before
        for row in listed:  # the same conversations as if each message had been masked by hand
            for call_id, (prompt, reply) in store.conversations(row["id"]).items():
                was, answer = conversations[row["id"]][call_id]
                assert prompt == [EMAILS.message(message) for message in was] and reply == EMAILS.message(answer)
        store.close()
        vacuum(store.path)
        assert b"@mail.example" not in files(store.path)


@settings(max_examples=10)
@given(seeds)
def test_what_is_masked_before_it_is_stored_never_touches_the_disk(seed: int) -> None:
    with a_store(seed) as plain, a_store(seed, redactor=EMAILS) as masked:
        assert b"@mail.example" not in files(masked.path) and MARK.encode() in files(masked.path)
        assert tokens(plain).keys() == tokens(masked).keys()
        for rollout_id, (calls, samples) in tokens(plain).items():
            for one, other in zip(calls, tokens(masked)[rollout_id][0], strict=True):
                assert one == other
            assert samples == tokens(masked)[rollout_id][1]
        assert masked.check() == []


@settings(max_examples=15)
@given(seeds, st.sampled_from([{"before": 150.0}, {"step": 1}, {"states": ["failed"]}, {}]), st.booleans())
def test_after_pruning_the_rest_is_whole(seed: int, rule: dict[str, Any], text_only: bool) -> None:
    with a_store(seed) as store:
        before, listed = tokens(store), {row["id"]: row for row in store.rollouts()}
        pruned = store.with_traffic(**rule) if text_only else store.prunable(**rule)
        asyncio.run((store.remove_text if text_only else store.remove_traffic)(pruned))
        assert store.check() == [] and store.unused_messages() == 0
        for row in store.rollouts():
            gone = row["id"] in pruned.rollouts
            was = listed[row["id"]]
            kept = {key: value for key, value in row.items() if key not in ("flags", "cause")}
            assert kept == {key: was[key] for key in kept}  # the numbers stay true
            assert ("pruned" in row["flags"]) == (gone and not text_only)
            after = tokens(store)[row["id"]]
            assert after == (([], []) if gone and not text_only else before[row["id"]])
            if gone:
                assert row["cause"] in ("", "exit")
                assert all(said == ([], None) for said in store.conversations(row["id"]).values())
        if not rule:
            assert sorted(pruned.rollouts) == sorted(listed)
            store.close()
            assert b"mail.example" not in files(store.path).replace(b"of task@mail.example", b"")


async def test_messages_that_become_equal_become_one(store: Store) -> None:
    await a_rollout(store)
    said = [{"role": "user", "content": f"{name}@mail.example"} for name in ("a", "b", "c")]
    first = await store.add_call(a_call(new_messages=said, reply_message={"role": "assistant", "content": "a@x.org"}))
    changed = await store.mask(EMAILS)
    assert changed["messages"] == 4
    assert store.messages(first) == [{"role": "user", "content": MARK}] * 3
    database = sqlite3.connect(store.path)
    assert database.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    assert (await store.mask(EMAILS))["messages"] == 0
    # and a message that is said again is found by its masked form
    store.redactor = EMAILS
    again = await store.add_call(a_call(new_messages=[{"role": "user", "content": "d@mail.example"}]))
    assert store.messages(again) == [{"role": "user", "content": MARK}]
    assert database.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    database.close()


async def test_what_training_needs_is_spared(store: Store) -> None:
    await store.set_meta("manifest", {})
    for name in ("open", "complete", "trained", "used", "dropped"):
        await store.add_group(f"g-{name}", "t", "train", 1)
        await store.add_rollout(f"r-{name}", "t", f"g-{name}", "train", "local")
        await store.set_rollout_state(f"r-{name}", "running", attempt=1)
        await store.add_call(a_call(f"r-{name}"))
        if name != "open":
            await store.set_rollout_state(f"r-{name}", "done", finished_at=1.0)
            await store.update_group(f"g-{name}", state=name)
    await store.add_step(1, 1, "applied", {}, 0, 1, groups=["g-used"], fates={"r-used": "trained"})
    await store.add_checkpoint(1, 1, "checkpoints/step-1")
    await store.add_step(2, 2, "applied", {}, 0, 1, groups=["g-trained"], fates={"r-trained": "trained"})
    found = store.prunable(before=2.0)
    # step 2 has no checkpoint yet: a crash now would make its group untrained again
    assert (found.rollouts, found.spared) == (["r-used", "r-dropped"], ["r-complete", "r-trained"])
    evaluation = await store.start_evaluation(1, 1)
    await store.add_group("g-val", "t", "val", 1, eval_id=evaluation)
    await store.add_rollout("r-val", "t", "g-val", "val", "local")
    await store.set_rollout_state("r-val", "done", finished_at=1.0, attempt=1)
    assert "r-val" in store.prunable().spared
    await store.finish_evaluation(evaluation, "done", {})
    assert "r-val" in store.prunable().rollouts


async def test_going_back_takes_back_pruned_rollouts_too(store: Store) -> None:
    await a_rollout(store)
    await store.add_call(a_call(versions=[[7, 2]]))
    await store.set_rollout_state("r-1", "done")
    await store.remove_traffic(store.prunable())
    await store.roll_back(6)
    assert "rolled_back" in store.rollout("r-1")["flags"] and store.rollout("r-1")["policy_version_max"] == 7


async def test_a_message_that_a_new_call_says_again_is_kept(store: Store) -> None:
    await a_rollout(store)
    message = {"role": "user", "content": "hello"}
    await store.add_call(a_call(new_messages=[message]))
    await store.set_rollout_state("r-1", "done")
    await a_rollout(store, "r-2")
    from aglite.store import prune

    pruned = store.prunable()
    counted = [store.rollout("r-1")]
    await store._write(lambda db: prune.remove_traffic(db, counted))
    unused, newest = prune.unused_messages(store._reader())
    call = await store.add_call(a_call("r-2", new_messages=[message]))  # between the look and the removal
    assert await store._write(lambda db: prune.remove_messages(db, unused, newest)) == 0
    assert pruned.rollouts == ["r-1"] and store.messages(call) == [message] and store.check() == []


async def test_tokens_only_stores_no_text(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "aglite.db", keep_messages=False)
    await a_rollout(store)
    await store.add_call(
        a_call(
            new_messages=[{"role": "user", "content": "a secret"}],
            reply_message={"role": "assistant", "content": "a secret"},
            request={"asked": {"stop": ["a secret"], "seed": 3, "instructions": True}, "used": {"max_tokens": 4}},
        )
    )
    assert store.calls("r-1")[0].request == {"asked": {"seed": 3, "instructions": True}, "used": {"max_tokens": 4}}
    assert store.calls("r-1")[0].response_ids.tolist() == [4, 5]
    store.close()
    assert b"secret" not in files(store.path)


BREAKAGES = {
    "UPDATE calls SET prompt_len = 99 WHERE id = 1": "its prompt of 99 tokens is not 0 + 3",
    "UPDATE calls SET response_len = 9 WHERE id = 1": "it has 2 sampled tokens instead of 9",
    "UPDATE calls SET versions = '[[0,1]]' WHERE id = 1": "do not add up to 2",
    "UPDATE calls SET version_max = 5 WHERE id = 1": "not 0 to 5",
    "UPDATE calls SET logprobs = x'00' WHERE id = 1": "log-probabilities",
    "UPDATE calls SET base_id = 77 WHERE id = 2": "its base, call 77, is not",
    "UPDATE calls SET base_len = 77 WHERE id = 2": "it takes 77 tokens of its base, which has 5",
    "UPDATE calls SET base_messages = 7 WHERE id = 2": "it takes 7 messages of its base, which has 2",
    "UPDATE calls SET parent_id = 9 WHERE id = 2": "it names calls that are not earlier ones of its rollout: [9]",
    "UPDATE calls SET reply_message = 50 WHERE id = 1": "messages are missing: [50]",
    "DELETE FROM messages WHERE id = 1": "messages are missing: [1]",
    "UPDATE messages SET body = 'changed' WHERE id = 1": "message 1 is not what its hash says",
    "DELETE FROM calls WHERE id = 2": "its calls [2] are not there",
    "UPDATE calls SET new_prompt_ids = x'09000000' WHERE id = 2": "",
    "UPDATE samples SET trained_tokens = 1": "it rebuilds to 7 tokens, 3 trained; 7, 1 were",
    "UPDATE samples SET calls = '[[2,1],[1,1]]'": "do not continue one another",
    "UPDATE samples SET step = 4": "there are samples of step 4, but no such step",
    "UPDATE rollouts SET pruned = '{}'": "is marked as pruned and has 2 calls",
}


@pytest.mark.parametrize("sql", BREAKAGES)
async def test_check_finds_what_is_broken(store: Store, sql: str) -> None:
    await a_rollout(store)
    hello = {"role": "user", "content": "hello"}
    first = await store.add_call(a_call(new_messages=[hello], reply_message={"role": "assistant", "content": "yes"}))
    more = {"base_id": first, "base_len": 5, "base_messages": 2, "parent_id": first}
    second = await store.add_call(a_call(prompt=[9], response=[8], new_messages=[hello], **more))
    sample = SampleRecord("r-1", [(first, True), (second, True)], 7, 3, 0.5, 0.1)
    await store.add_step(1, 1, "applied", {}, 0, 1, samples=[sample])
    assert store.check() == []
    database = sqlite3.connect(store.path)
    database.execute(sql)
    database.commit()
    database.close()
    problems = store.check()
    expected = BREAKAGES[sql]
    if not expected:  # other tokens of the same number: nothing that this can know of
        assert problems == []
    else:
        assert any(expected in problem for problem in problems), problems


async def test_only_the_owner_reads_the_file(tmp_path: Path) -> None:
    for name in ("aglite.db", "old.db"):
        path = tmp_path / name
        if name == "old.db":
            path.touch(0o644)
        store = Store.open(path)
        await store.set_meta("key", 1)
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob(f"{name}*")}
        store.close()
        assert len(modes) == 3 and set(modes.values()) == {0o600}, modes


def test_export_of_what_is_left(tmp_path: Path) -> None:
    from aglite.export import export
    from aglite.paths import RunDir

    run = RunDir(tmp_path)
    store = Store.open(run.db)
    asyncio.run(fill(store, 3))
    asyncio.run(store.remove_traffic(store.prunable(step=1)))
    left = {row["id"] for row in store.rollouts() if "pruned" not in row["flags"]}
    store.close()
    for what in ("samples", "calls"):
        export(run, what, "jsonl", tmp_path / "out.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert {row["rollout_id"] for row in rows} == left == {"r-20", "r-21"}
    assert export(run, "rollouts", "jsonl", tmp_path / "out.jsonl") == 4
