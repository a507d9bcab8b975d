"""Calls: what goes in comes out, exactly, and costs what its tokens cost."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making_calls import a_call, a_rollout

from aglite.errors import StoreError
from aglite.store import SampleRecord, Store

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
texts = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too: agents send them
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": texts},
    optional={"tool_calls": st.lists(st.dictionaries(texts, st.integers() | st.booleans() | st.none()), max_size=2)},
)


@st.composite
def conversation_forest(draw: Any) -> list[dict[str, Any]]:
    """Calls as a slow model that keeps every prompt and message list whole would have them."""
    calls: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.none() | st.integers(0, len(calls) - 1)) if calls else None
        whole = [] if base is None else calls[base]["prompt"] + calls[base]["response"]
        listed = [] if base is None else calls[base]["messages"] + [m for m in [calls[base]["reply"]] if m]
        base_len = draw(st.integers(0, len(whole)))
        base_messages = draw(st.integers(0, len(listed)))
        new_ids, new_messages = draw(tokens), draw(st.lists(message, max_size=3))
        response = draw(tokens)
        cut = draw(st.integers(0, len(response)))
        calls.append(
            {
                "base": base,
                "base_len": base_len,
                "base_messages": base_messages,
                "new_ids": new_ids,
                "new_messages": new_messages,
                "prompt": whole[:base_len] + new_ids,
                "messages": listed[:base_messages] + new_messages,
                "response": response,
                "logprobs": draw(st.lists(st.floats(width=32), min_size=len(response), max_size=len(response))),
                "versions": [[3, cut], [4, len(response) - cut]],
                "reply": draw(st.none() | message),
            }
        )
    return calls


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store.open(tmp_path_factory.mktemp("calls") / "aglite.db")
    yield store
    assert store.check() == []
    store.close()


numbers = itertools.count()


@settings(max_examples=120)
@given(forest=conversation_forest())
def test_any_conversation_forest_is_rebuilt_exactly(shared_store: Store, forest: list[dict[str, Any]]) -> None:
    store, name = shared_store, f"r-{next(numbers)}"

    async def record() -> list[int]:
        await a_rollout(store, name)
        ids: list[int] = []
        for order, call in enumerate(forest):
            base = {} if call["base"] is None else {"base_id": ids[call["base"]], "base_len": call["base_len"]}
            if base:
                base["base_messages"] = call["base_messages"]
            record = a_call(
                name,
                call["new_ids"],
                call["response"],
                logprobs=call["logprobs"],
                versions=call["versions"],
                new_messages=call["new_messages"],
                reply_message=call["reply"],
                started_at=float(order),
                **base,
            )
            ids.append(await store.add_call(record))
        return ids

    ids = asyncio.run(record())
    stored = store.calls(name)
    assert [call.id for call in stored] == ids
    for call, expected in zip(stored, forest, strict=True):
        assert call.prompt_ids.tolist() == expected["prompt"]
        assert call.response_ids.tolist() == expected["response"]
        assert call.logprobs.tobytes() == array("f", expected["logprobs"]).tobytes()
        assert call.versions == expected["versions"]
        assert store.messages(call) == expected["messages"]
        assert store.reply(call) == expected["reply"]
    assert store.conversations(name) == {
        call_id: (call["messages"], call["reply"]) for call_id, call in zip(ids, forest, strict=True)
    }
    row = store.rollout(name)
    assert row["calls"] == len(forest)
    assert row["prompt_tokens"] == sum(len(call["prompt"]) for call in forest)
    assert row["sampled_tokens"] == sum(len(call["response"]) for call in forest)
    used = {version for call in forest for version, count in call["versions"] if count}
    assert (row["policy_version_min"], row["policy_version_max"]) == (min(used, default=None), max(used, default=None))


async def test_every_field_of_a_call_is_kept(store: Store) -> None:
    await a_rollout(store)
    first = await store.add_call(a_call())
    given = {
        "parent_id": first,
        "matched_id": first,
        "fork_cause": "edited",
        "dialect": "messages",
        "request": {"temperature": 0.3, "stop": ["x"]},
        "finish_reason": "tool_calls",
        "status": "cancelled",
        "error": "client went away",
        "delivered": False,
        "retry_of": first,
        "constrained": True,
        "held_s": 1.5,
        "started_at": 10.0,
        "first_token_at": 11.0,
        "finished_at": 12.0,
    }
    second = await store.add_call(a_call(**given))
    stored = store.call(second)
    assert {name: getattr(stored, name) for name in given} == given
    await store.mark_delivered([first, second])
    assert [call.delivered for call in store.calls("r-1")] == [True, True]
    assert set(stored.json()) == set(
        [
            "id",
            "parent_id",
            "fork_cause",
            "dialect",
            "prompt_ids",
            "response_ids",
            "logprobs",
            "versions",
            "constrained",
            "finish_reason",
            "status",
            "started_at",
            "first_token_at",
            "finished_at",
        ]
    )


async def test_only_the_last_attempt_is_read_unless_asked(store: Store) -> None:
    await a_rollout(store)
    await store.add_call(a_call(response=[1]))
    await store.set_rollout_state("r-1", "starting", attempt=2)
    assert store.calls("r-1") == [] and store.rollout("r-1")["calls"] == 0
    await store.add_call(a_call(response=[2], attempt=2))
    assert [call.response_ids.tolist() for call in store.calls("r-1")] == [[2]]
    assert [call.response_ids.tolist() for call in store.calls("r-1", attempt=1)] == [[1]]


async def test_calls_come_in_the_order_they_were_started(store: Store) -> None:
    await a_rollout(store)
    slow, quick = a_call(response=[1], started_at=1.0), a_call(response=[2], started_at=1.5)
    await store.add_call(quick)
    await store.add_call(slow)
    assert [call.response_ids[0] for call in store.calls("r-1")] == [1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt_len": 9}, "prompt_len 9"),
        ({"logprobs": [-1.0]}, "1 log-probabilities for 2"),
        ({"versions": [[0, 1]]}, "do not add up to 2"),
        ({"base_messages": 1}, "without a base_id"),
        ({"base_id": 1, "base_len": 6}, "base_len cannot be 6"),
        ({"base_id": 999, "base_len": 0}, "call 999 is no call of attempt 1 of rollout r-1"),
        ({"base_id": 2, "base_len": 0}, "call 2 is no call of attempt 1 of rollout r-1"),
        ({"response": [2**31, 0]}, "integers that fit"),
        ({"request": {"tool": object()}}, "JSON"),
    ],
)
async def test_a_call_that_does_not_add_up_is_refused(store: Store, given: dict[str, Any], said: str) -> None:
    await a_rollout(store, "r-1")
    await a_rollout(store, "r-2")
    await store.add_call(a_call("r-1"))
    await store.add_call(a_call("r-2"))
    with pytest.raises(StoreError) as refusal:
        await store.add_call(a_call("r-1", **given))
    assert said in refusal.value.message
    assert len(store.calls("r-1")) == 1


async def test_equal_messages_are_stored_once(store: Store) -> None:
    for number in range(20):
        await a_rollout(store, f"r-{number}")
        system = {"role": "system", "content": "You are helpful. " * 1000}
        await store.add_call(a_call(f"r-{number}", new_messages=[system, {"role": "user", "content": str(number)}]))
    store.close()
    assert store.path.stat().st_size < 200_000


async def test_tokens_alone_can_be_kept(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "aglite.db", keep_messages=False)
    await a_rollout(store)
    said = {"role": "user", "content": "private"}
    first = await store.add_call(a_call(new_messages=[said], reply_message=said))
    second = await store.add_call(a_call(base_id=first, base_len=5, base_messages=2, new_messages=[said]))
    assert store.messages(second) == [] and store.reply(first) is None
    assert store.calls("r-1")[1].prompt_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    store.close()
    assert b"private" not in store.path.read_bytes()


async def test_a_thousand_turns(store: Store) -> None:
    await a_rollout(store)
    base: dict[str, Any] = {}
    for turn in range(1000):
        said = [{"role": "user", "content": f"turn {turn}"}]
        reply = {"role": "assistant", "content": f"reply {turn}"}
        call_id = await store.add_call(
            a_call(prompt=[turn] * 4, response=[turn], new_messages=said, reply_message=reply, started_at=turn, **base)
        )
        base = {"base_id": call_id, "base_len": 5 * (turn + 1), "base_messages": 2 * (turn + 1)}
    started = time.process_time()
    last = store.calls("r-1")[-1]
    messages = store.messages(last)
    assert store.conversations("r-1")[last.id][0] == messages
    assert time.process_time() - started < 2
    assert last.prompt_ids.tolist() == [turn for turn in range(1000) for _ in range(5)][:-1]
    assert len(messages) == 1999
    assert [m["content"] for m in messages[-3:]] == ["turn 998", "reply 998", "turn 999"]


async def test_tokens_cost_at_most_ten_bytes_on_disk(tmp_path: Path) -> None:
    """200 rollouts of 10 turns, each with 256 new prompt tokens and 64 sampled ones; all but message text included."""
    store = Store.open(tmp_path / "aglite.db")

    async def rollout(number: int) -> None:
        name, base = f"r-{number:010x}", {}
        await a_rollout(store, name, f"g-{number:08x}")
        for turn in range(10):
            call_id = await store.add_call(
                a_call(
                    name,
                    range(turn * 256, turn * 256 + 256),
                    range(64),
                    logprobs=[-0.1 * k for k in range(64)],
                    request={"temperature": 0.7, "max_tokens": 64, "stream": True, "stop": None, "tools": 4},
                    new_messages=[{"role": "user", "content": f"{number} {turn}"}],
                    reply_message={"role": "assistant", "content": f"{number} {turn}"},
                    finish_reason="stop",
                    started_at=time.time(),
                    finished_at=time.time(),
                    first_token_at=time.time(),
                    **base,
                )
            )
            base = {"base_id": call_id, "base_len": 320 * (turn + 1), "base_messages": 2 * (turn + 1)}
        await store.set_rollout_state(name, "done", reward=1.0)

    await asyncio.gather(*(rollout(number) for number in range(200)))
    store.close()
    recorded = 200 * 10 * (256 + 64)
    assert store.path.stat().st_size / recorded <= 10


async def test_samples_are_rebuilt_from_their_calls(store: Store) -> None:
    await a_rollout(store)
    a = await store.add_call(a_call(prompt=[1, 2], response=[3, 4], logprobs=[-1, -2], versions=[[0, 1], [1, 1]]))
    b = await store.add_call(
        a_call(prompt=[5], response=[6], base_id=a, base_len=4, versions=[[1, 1]], constrained=True)
    )
    c = await store.add_call(a_call(prompt=[7], response=[8], base_id=a, base_len=4, versions=[[2, 1]]))
    paths = [[(a, True), (b, True)], [(a, False), (c, True)]]
    await store.add_samples(
        1, [SampleRecord("r-1", path, 6, count, 0.5, 0.25) for path, count in zip(paths, (3, 1), strict=True)]
    )
    first, second = store.samples(step=1)
    assert first.json() == {
        "input_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "logprobs": [0, 0, -1, -2, 0, -0.5],
        "versions": [-1, -1, 0, 1, -1, 1],
        "constrained": [0, 0, 0, 0, 0, 1],
        "calls": [[a, 1], [b, 1]],
        "advantage": 0.5,
        "weight": 0.25,
    }
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 1] and second.versions.tolist() == [-1] * 5 + [2]
    assert store.samples(step=2) == [] and len(store.samples(rollout_id="r-1")) == 2
    row = store.rollout("r-1")
    assert (row["samples"], row["trained_tokens"]) == (2, 4)
