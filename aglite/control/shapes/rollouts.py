"""Rollouts: a row, one in full, and its tokens."""

from __future__ import annotations

from typing import Any

from aglite.control.shapes.base import Shape, State


class Rollout(Shape):
    id: str
    task_id: str
    group: str | None
    split: str
    state: State
    cause: str
    """`code: what happened`, of one that ended other than well."""
    attempt: int
    backend: str
    calls: int
    samples: int
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    policy_version_min: int | None
    policy_version_max: int | None
    reward: float | None
    breakdown: dict[str, float]
    flags: list[str]
    created_at: float
    started_at: float | None
    finished_at: float | None


class StateChange(Shape):
    attempt: int
    state: State
    cause: str
    at: float


class ForkDiff(Shape):
    """The first difference to an earlier call."""

    against: int
    """That call's id."""
    message: dict[str, Any] | None
    tools: list[list[str]] | None
    tokens: dict[str, Any] | None


class Call(Shape):
    id: int
    parent_id: int | None
    matched_id: int | None
    """The call that its messages continue."""
    fork_cause: str
    """Empty where it continues its parent's tokens."""
    dialect: str
    prompt_tokens: int
    sampled_tokens: int
    versions: list[list[int]]
    """[policy version, tokens], in order."""
    constrained: bool
    finish_reason: str
    status: str
    error: str
    delivered: bool
    held_s: float
    started_at: float
    first_token_at: float | None
    finished_at: float
    messages: list[dict[str, Any]]
    reply: dict[str, Any] | None
    fork_diff: ForkDiff | None


class Sample(Shape):
    step: int
    calls: list[list[int]]
    """[call, 1 if it is trained here], from root to leaf."""
    tokens: int
    trained_tokens: int
    constrained_tokens: int
    advantage: float
    weight: float
    """Of each trained token."""


class JudgeCall(Shape):
    attempt: int
    model: str
    status: int
    request: dict[str, Any]
    reply: dict[str, Any]
    started_at: float
    finished_at: float


class RolloutDetail(Rollout):
    """A rollout with everything that happened in it."""

    task: dict[str, Any] | None
    states: list[StateChange]
    call_rows: list[Call]
    sample_rows: list[Sample]
    judge_calls: list[JudgeCall]
    log_tail: str


class TokenSample(Shape):
    """One entry a token in all lists but `calls`."""

    calls: list[list[int]]
    """[call, 1 if it is trained here], from root to leaf."""
    ids: list[int]
    texts: list[str] | None
    """Null where the run's text is masked."""
    mask: list[int]
    """1 on tokens that were sampled and are trained in this sample."""
    logprobs: list[float]
    versions: list[int]
    """-1 where the mask is 0."""
    constrained: list[int]
