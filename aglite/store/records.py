"""What goes into the store and comes out of it, and how arrays and JSON are packed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aglite.arrays import Code, pack, unpack
from aglite.errors import StoreError


@dataclass(slots=True)
class CallRecord:
    """One model request of an attempt, as the gateway records it.

    Tokens are kept once: prompt = (prompt + response of call `base_id`)[:base_len] + new_prompt_ids, without a base
    just new_prompt_ids. Messages likewise: the list of a call is its prompt's messages followed by its reply, if it
    has one; the prompt's messages of this call = (list of `base_id`)[:base_messages] + new_messages.
    """

    rollout_id: str
    attempt: int
    new_prompt_ids: Sequence[int]
    prompt_len: int
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural logarithms, one a response token; empty when the engine gives none."""
    versions: Sequence[Sequence[int]]
    """[[policy version, number of tokens], ...] in the order sampled; the numbers add up to the response's length."""
    dialect: str
    status: str
    """ok | error | cancelled"""
    started_at: float
    finished_at: float
    first_token_at: float | None = None
    parent_id: int | None = None
    """The earlier call whose prompt + response is the longest token prefix of this prompt."""
    matched_id: int | None = None
    """The earlier call that the messages continue."""
    fork_cause: str = ""
    base_id: int | None = None
    base_len: int = 0
    base_messages: int = 0
    new_messages: Sequence[dict[str, Any]] = ()
    reply_message: dict[str, Any] | None = None
    request: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    error: str = ""
    delivered: bool = False
    retry_of: int | None = None
    constrained: bool = False
    held_s: float = 0.0
    reply_id: str | None = None
    """Under which a later request may name the reply."""


@dataclass(slots=True)
class StoredCall:
    """A call read back, its prompt rebuilt. Token ids are `array('i')`, log-probabilities `array('f')`."""

    id: int
    rollout_id: str
    attempt: int
    parent_id: int | None
    matched_id: int | None
    fork_cause: str
    base_id: int | None
    base_len: int
    prompt_ids: array
    response_ids: array
    logprobs: array
    versions: list[list[int]]
    dialect: str
    request: dict[str, Any]
    finish_reason: str
    status: str
    error: str
    delivered: bool
    retry_of: int | None
    constrained: bool
    held_s: float
    started_at: float
    first_token_at: float | None
    finished_at: float

    def json(self) -> dict[str, Any]:
        """The design's *JSON of a call*."""
        return {
            "id": self.id,
            "parent_id": self.parent_id,
            "fork_cause": self.fork_cause,
            "dialect": self.dialect,
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "logprobs": self.logprobs.tolist(),
            "versions": self.versions,
            "constrained": self.constrained,
            "finish_reason": self.finish_reason,
            "status": self.status,
            "started_at": self.started_at,
            "first_token_at": self.first_token_at,
            "finished_at": self.finished_at,
        }


@dataclass(slots=True)
class SampleRecord:
    """One trained token sequence, as the ids of the calls on its path: the tokens are already in the calls."""

    rollout_id: str
    calls: Sequence[tuple[int, bool]]
    """(call id, trained here), from root to leaf."""
    tokens: int
    trained_tokens: int
    advantage: float
    weight: float
    """Of each trained token in the loss."""


@dataclass(slots=True)
class StoredSample:
    """A sample read back, as the trainer saw it. One entry a token in the five arrays; where the mask is 0 the
    log-probability is 0 and the version -1. `constrained` is 1 on tokens that were sampled under a grammar."""

    id: int
    step: int
    rollout_id: str
    input_ids: array
    loss_mask: array
    logprobs: array
    versions: array
    constrained: array
    calls: list[tuple[int, bool]]
    advantage: float
    weight: float

    def json(self) -> dict[str, Any]:
        """The design's *JSON of a sample*."""
        return {
            "input_ids": self.input_ids.tolist(),
            "loss_mask": self.loss_mask.tolist(),
            "logprobs": self.logprobs.tolist(),
            "versions": self.versions.tolist(),
            "constrained": self.constrained.tolist(),
            "calls": [[call_id, int(trained)] for call_id, trained in self.calls],
            "advantage": self.advantage,
            "weight": self.weight,
        }


def pack_ids(ids: Iterable[int]) -> bytes:
    """int32, little-endian. Raises StoreError for what is no token id."""
    return _pack("i", ids)


def pack_floats(values: Iterable[float]) -> bytes:
    """float32, little-endian."""
    return _pack("f", values)


def pack_rows(row_ids: Iterable[int]) -> bytes:
    """int64, little-endian."""
    return _pack("q", row_ids)


def unpack_ids(data: bytes) -> array:
    return unpack("i", data)


def unpack_floats(data: bytes) -> array:
    return unpack("f", data)


def unpack_rows(data: bytes) -> array:
    return unpack("q", data)


def pack_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as a cut emoji of an agent leaves it: no UTF-8, but valid JSON
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"cannot be stored as JSON: {error}") from error
    return text


def without_detail(text: str) -> str:
    """Of `exit: code 1: what the agent printed`, a cause or an error, what aglite says itself: `exit`."""
    return text.partition(":")[0]


def without_text(value: dict[str, Any]) -> dict[str, Any]:
    """Of a JSON object what is no text: numbers, booleans, and objects of these."""
    kept = {key: without_text(inner) if isinstance(inner, dict) else inner for key, inner in value.items()}
    return {
        key: inner for key, inner in kept.items() if isinstance(inner, int | float) or (inner and type(inner) is dict)
    }


def _pack(code: Code, values: Iterable[float]) -> bytes:
    try:
        return pack(code, values)
    except (TypeError, OverflowError) as error:
        raise StoreError(f"not a list of {'numbers' if code == 'f' else 'integers'} that fit: {error}") from error
