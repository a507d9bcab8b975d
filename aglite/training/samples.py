"""From the calls of a rollout to the token sequences that the trainer sees. Pure functions.

A conversation grows by appending, sub-agents interleave with it and history gets edited, so a rollout's calls form a
forest: the parent of a call is the earlier call whose prompt + response is the longest token prefix of its prompt.
A sample is a path of that forest from a root to a leaf, which is just the leaf's own prompt + response. Every sampled
token carries loss exactly once (aglite's design, 'Samples').
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Call(Protocol):
    """What is read of a call: a `StoredCall` will do."""

    @property
    def id(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def versions(self) -> Sequence[Sequence[int]]: ...
    @property
    def constrained(self) -> bool: ...


@dataclass(slots=True)
class Sample:
    """One token sequence of T tokens with everything the trainer needs to know about each of them.

    `logprobs` are 0, `versions` -1 and `constrained` 0 wherever `loss_mask` is 0.
    """

    input_ids: array
    """int32 [T]"""
    loss_mask: array
    """int8 [T]: 1 on tokens that were sampled and are trained in this sample"""
    logprobs: array
    """float32 [T]: recorded log-probability of token t given the tokens before it"""
    versions: array
    """int32 [T]: policy version that sampled token t"""
    constrained: array
    """int8 [T]: 1 on tokens that were sampled under a grammar: from another distribution than `logprobs` speak of, so
    that no importance weight can be told"""
    calls: list[tuple[int, bool]]
    """(call id, trained in this sample) from root to leaf"""

    @property
    def trained_tokens(self) -> int:
        return self.loss_mask.count(1)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the trained tokens."""
        return min(version for version in set(self.versions) if version >= 0)


def loss_bearing(calls: Sequence[Any]) -> list[Any]:
    """The calls that carry loss: not those without tokens, whose reply never reached the agent, or that are the unused
    copy of a retried request. Takes `StoredCall`s; keeps their order."""
    return [call for call in calls if len(call.response_ids) and call.delivered and call.retry_of is None]


def find_parents(calls: Sequence[Call]) -> list[int | None]:
    """For each of n calls, in the order they were started, the index of its parent; None for a root.

    The parent is the earlier call whose prompt + response is the longest prefix of the prompt, the earliest on a tie.
    With T tokens a call at most this takes O(n T) steps for hashing and O(n^2) small ones for look-ups: a rolling
    checksum of a prompt is compared at those lengths only where an earlier call ends, and hits are verified.
    """
    parents: list[int | None] = []
    ends: dict[int, dict[int, list[int]]] = {}  # length -> checksum -> calls that end there, earliest first
    whole: list[bytes] = []
    for index, call in enumerate(calls):
        prompt = array("i", call.prompt_ids).tobytes()
        view, checksum, done = memoryview(prompt), 0, 0
        hits: list[list[int]] = []
        for length in sorted(length for length in ends if length <= len(prompt)):
            checksum = zlib.crc32(view[done:length], checksum)
            done = length
            if (found := ends[length].get(checksum)) is not None:
                hits.append(found)
        matching = (earlier for found in reversed(hits) for earlier in found if prompt.startswith(whole[earlier]))
        parents.append(next(matching, None))
        response = array("i", call.response_ids).tobytes()
        checksum = zlib.crc32(response, zlib.crc32(view[done:], checksum))
        whole.append(prompt + response)
        ends.setdefault(len(whole[-1]), {}).setdefault(checksum, []).append(index)
    return parents


def build_samples(calls: Sequence[Call]) -> list[Sample]:
    """The samples of one rollout attempt, one for each leaf of its forest, in the order of the leaves.

    `calls` are its loss-bearing calls in the order they were started. A call that several paths share is trained in
    the path whose leaf was started first. Raises ValueError for a call without log-probabilities.
    """
    parents = find_parents(calls)
    inner = set(parents)
    claimed: set[int] = set()
    samples = []
    for leaf in range(len(calls)):
        if leaf in inner:
            continue
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            path.append(node)
            node = parents[node]
        samples.append(join_path([(calls[node], node not in claimed) for node in reversed(path)]))
        claimed.update(path)
    return samples


def join_path(path: Sequence[tuple[Call, bool]]) -> Sample:
    """The sample of a path, (call, trained here) from root to leaf: the leaf's tokens, with loss on the responses of
    the trained calls. Raises ValueError for a trained call that has not one log-probability and version a token."""
    leaf = path[-1][0]
    ids = array("i", leaf.prompt_ids)
    ids.extend(array("i", leaf.response_ids))
    mask = array("b", bytes(len(ids)))
    logprobs = array("f", bytes(4 * len(ids)))
    versions = array("i", [-1]) * len(ids)
    constrained = array("b", bytes(len(ids)))
    for call, trained in path:
        if not trained:
            continue
        start, count = len(call.prompt_ids), len(call.response_ids)
        spans = array("i")
        for version, length in call.versions:
            spans.extend(array("i", [version]) * length)
        if not len(call.logprobs) == len(spans) == count:
            raise ValueError(
                f"call {call.id} has {count} sampled tokens, {len(call.logprobs)} log-probabilities and "
                f"{len(spans)} policy versions: it cannot be trained"
            )
        mask[start : start + count] = array("b", [1]) * count
        logprobs[start : start + count] = array("f", call.logprobs)
        versions[start : start + count] = spans
        constrained[start : start + count] = array("b", [call.constrained]) * count
    return Sample(ids, mask, logprobs, versions, constrained, [(call.id, trained) for call, trained in path])
