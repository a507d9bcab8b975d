"""Samples against a slow, obvious forest; each sampled token is trained exactly once."""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aglite.training.samples import build_samples, find_parents, join_path, loss_bearing


@dataclass
class ACall:
    id: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    delivered: bool = True
    retry_of: int | None = None
    constrained: bool = False

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        if not self.logprobs:
            self.logprobs = [-(self.id + k / 64) for k in range(n)]
        if not self.versions:
            self.versions = [[self.id % 3, n]]


@st.composite
def traffic(draw: Any) -> list[ACall]:
    """Calls that continue, fork, edit and repeat one another: few different tokens, so that prefixes often agree."""
    token = st.integers(0, 1)
    calls: list[ACall] = []
    for index in range(draw(st.integers(1, 9))):
        prompt: list[int] = []
        if calls and draw(st.booleans()):
            base = calls[draw(st.integers(0, len(calls) - 1))]
            whole = base.prompt_ids + base.response_ids
            prompt = whole[: draw(st.sampled_from([len(whole), len(base.prompt_ids), len(whole) - 1]))]
        prompt = prompt + draw(st.lists(token, max_size=3))
        response = draw(st.lists(token, min_size=1, max_size=3))
        cut = draw(st.integers(0, len(response)))
        spans = [[index, cut], [index + 1, len(response) - cut]]
        calls.append(ACall(100 + index, prompt, response, versions=spans, constrained=draw(st.booleans())))
    return calls


def slow_parents(calls: list[ACall]) -> list[int | None]:
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        best, best_length = None, -1
        for earlier in range(index):
            whole = calls[earlier].prompt_ids + calls[earlier].response_ids
            if call.prompt_ids[: len(whole)] == whole and len(whole) > best_length:
                best, best_length = earlier, len(whole)
        parents.append(best)
    return parents


def slow_samples(calls: list[ACall]) -> list[dict[str, list]]:
    """Token by token, with dictionaries: no cleverness shared with what is tested."""
    parents = slow_parents(calls)
    leaves = [index for index in range(len(calls)) if index not in parents]
    owner = {}
    for leaf in leaves:  # the earliest leaf first
        node: int | None = leaf
        while node is not None:
            owner.setdefault(node, leaf)
            node = parents[node]
    samples = []
    for leaf in leaves:
        ids = calls[leaf].prompt_ids + calls[leaf].response_ids
        rows = [[0, 0.0, -1] for _ in ids]
        path = []
        node = leaf
        while node is not None:
            path.insert(0, (calls[node].id, owner[node] == leaf))
            if owner[node] == leaf:
                versions = [version for version, count in calls[node].versions for _ in range(count)]
                for k in range(len(calls[node].response_ids)):
                    rows[len(calls[node].prompt_ids) + k] = [1, calls[node].logprobs[k], versions[k]]
            node = parents[node]
        mask, logprobs, versions = (list(column) for column in zip(*rows, strict=True))
        samples.append({"ids": ids, "mask": mask, "logprobs": logprobs, "versions": versions, "calls": path})
    return samples


@settings(max_examples=400)
@given(calls=traffic())
@example(calls=[ACall(1, [0], [1]), ACall(2, [0], [1]), ACall(3, [0, 1, 0], [1])])
def test_the_forest_is_that_of_the_obvious_implementation(calls: list[ACall]) -> None:
    assert find_parents(calls) == slow_parents(calls)
    samples = build_samples(calls)
    expected = slow_samples(calls)
    assert len(samples) == len(expected)
    for sample, wanted in zip(samples, expected, strict=True):
        assert sample.input_ids.tolist() == wanted["ids"]
        assert sample.loss_mask.tolist() == wanted["mask"]
        assert sample.logprobs == array("f", wanted["logprobs"])
        assert sample.versions.tolist() == wanted["versions"]
        assert sample.calls == wanted["calls"]


@settings(max_examples=200)
@given(calls=traffic())
def test_every_sampled_token_is_trained_exactly_once(calls: list[ACall]) -> None:
    samples = build_samples(calls)
    trained = Counter(call_id for sample in samples for call_id, here in sample.calls if here)
    assert trained == Counter({call.id: 1 for call in calls})
    assert sum(sample.trained_tokens for sample in samples) == sum(len(call.response_ids) for call in calls)
    by_id = {call.id: call for call in calls}
    for sample in samples:
        for call_id, here in sample.calls:
            call = by_id[call_id]
            start, stop = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
            assert sample.input_ids[start:stop].tolist() == call.response_ids
            assert sample.loss_mask[start:stop].tolist() == [int(here)] * len(call.response_ids)
            held = here and call.constrained
            assert sample.constrained[start:stop].tolist() == [int(held)] * len(call.response_ids)
        assert all(kept or not held for kept, held in zip(sample.loss_mask, sample.constrained, strict=True))
        assert sample.trained_tokens > 0
        assert sample.oldest_version == min(
            v for v, kept in zip(sample.versions, sample.loss_mask, strict=True) if kept
        )


def test_a_plain_conversation_is_one_sample() -> None:
    calls = [ACall(1, [1], [2]), ACall(2, [1, 2, 3], [4]), ACall(3, [1, 2, 3, 4, 5], [6, 7])]
    (sample,) = build_samples(calls)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert sample.calls == [(1, True), (2, True), (3, True)]


def test_interleaved_sub_agents_are_one_sample_each() -> None:
    main = [ACall(1, [1], [2]), ACall(3, [1, 2, 3], [4])]
    sub = [ACall(2, [9], [8]), ACall(4, [9, 8, 7], [6])]
    samples = build_samples([main[0], sub[0], main[1], sub[1]])
    assert [sample.calls for sample in samples] == [[(1, True), (3, True)], [(2, True), (4, True)]]


def test_a_shared_turn_is_trained_with_the_earliest_leaf() -> None:
    root = ACall(1, [1], [2])
    long = [ACall(2, [1, 2, 3], [4]), ACall(4, [1, 2, 3, 4, 5], [6])]
    short = ACall(3, [1, 2, 7], [8])
    samples = build_samples([root, long[0], short, long[1]])
    # The leaf started first is call 3, though the other branch began earlier.
    assert [sample.calls for sample in samples] == [[(1, True), (3, True)], [(1, False), (2, True), (4, True)]]
    assert samples[1].loss_mask.tolist() == [0, 0, 0, 1, 0, 1]
    assert samples[1].logprobs[1] == 0 and samples[1].versions[1] == -1


def test_the_longest_prefix_is_the_parent_and_the_earliest_on_a_tie() -> None:
    calls = [ACall(1, [1], [2]), ACall(2, [1], [2]), ACall(3, [1, 2], [3]), ACall(4, [1, 2, 3, 9], [5])]
    assert find_parents(calls) == [None, None, 0, 2]
    # A later call is no parent, however well it fits; neither is one that ends past the prompt.
    assert find_parents([ACall(1, [1, 2, 3], [4]), ACall(2, [1], [2])]) == [None, None]
    assert find_parents([ACall(1, [1, 2], [3, 4]), ACall(2, [1, 2, 3], [4])]) == [None, None]


def test_equal_checksums_are_no_prefix() -> None:
    """Adding a multiple of CRC-32's polynomial leaves the checksum as it is."""
    polynomial = bytearray(8)
    for place, bit in enumerate(f"{0x104C11DB7:b}", start=2):
        polynomial[place // 8] |= int(bit) << place % 8
    forged = array("i", bytes(polynomial)).tolist()
    assert zlib.crc32(bytes(8)) == zlib.crc32(polynomial)
    calls = [ACall(1, [0], [0]), ACall(2, [*forged, 5], [6]), ACall(3, [0, 0, 5], [6])]
    assert find_parents(calls) == [None, None, 0]


def test_best_of_n_trains_every_sampling() -> None:
    samples = build_samples([ACall(1, [1, 2], [3]), ACall(2, [1, 2], [4]), ACall(3, [1, 2], [3])])
    assert [sample.calls for sample in samples] == [[(1, True)], [(2, True)], [(3, True)]]


def test_calls_without_loss_are_left_out_before_the_forest_is_built() -> None:
    kept = ACall(1, [1], [2])
    no_tokens = ACall(2, [1, 2, 3], [])
    undelivered = ACall(3, [1, 2, 3], [4], delivered=False)
    unused_copy = ACall(4, [1, 2, 3], [5], retry_of=3)
    last = ACall(5, [1, 2, 3, 4, 6], [7])
    calls = loss_bearing([kept, no_tokens, undelivered, unused_copy, last])
    assert calls == [kept, last]
    # What the undelivered call said is in the prompt of the last one, but is not trained.
    (sample,) = build_samples(calls)
    assert sample.loss_mask.tolist() == [0, 1, 0, 0, 0, 1]
    assert build_samples([]) == []


@pytest.mark.parametrize("fault", [{"logprobs": [-1.0]}, {"versions": [[0, 1]]}])
def test_a_token_without_its_record_cannot_be_trained(fault: dict[str, Any]) -> None:
    call = ACall(7, [1], [2, 3], **fault)
    with pytest.raises(ValueError, match="call 7 has 2 sampled tokens"):
        build_samples([call])
    assert join_path([(call, False)]).trained_tokens == 0


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_two_hundred_calls_of_twenty_thousand_tokens_take_a_moment(shape: str) -> None:
    noise = random.Random(0)
    tokens = array("i", (noise.randrange(150_000) for _ in range(20_000)))
    calls = []
    for index in range(200):
        end = 100 * index + 50 if shape == "chain" else 19_900
        response = tokens[end : end + 25] if shape == "chain" else array("i", [index] * (1 + index % 90))
        calls.append(ACall(index, tokens[:end], response))
    started = time.process_time()  # whatever else the machine does meanwhile
    samples = build_samples(calls)
    assert time.process_time() - started < 2
    assert len(samples) == (1 if shape == "chain" else 200)
