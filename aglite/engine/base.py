"""The engine contract: token ids in, token ids out. All text work is the gateway's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from aglite.errors import EngineError

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to sample one response. `top_k` 0, `top_p` 1 and `min_p` 0 mean off; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    """What the response must look like: a structural tag of xgrammar, as JSON. Only for engines that can
    (`EngineInfo.constrains`). The recorded log-probabilities stay those of the unconstrained distribution."""
    top_logprobs: int = 0
    """How many of the most probable tokens to report beside each sampled one."""
    whole: bool = False
    """Nobody reads along: the response may come in one chunk, where that is cheaper."""


@dataclass(slots=True)
class Chunk:
    """Tokens that were sampled since the last chunk, all by the weights of `version`.

    `logprobs` are natural logarithms under the distribution at temperature T *before* top_p, top_k and min_p (greedy:
    T = 1), one per token. The token that stops the response (end of turn) is included. The last chunk of a response,
    and only that one, has a `finish_reason`; it may carry no tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None = None
    top: list[list[tuple[int, float]]] | None = None
    """(token id, logprob) of the most probable tokens, best first, one list per token; None unless asked for."""


@dataclass(slots=True)
class EngineInfo:
    kind: str
    model: str
    context_length: int
    vocab_size: int
    details: dict = field(default_factory=dict)
    constrains: bool = False
    """Whether `SamplingParams.grammar` is obeyed."""


@dataclass(slots=True)
class EngineStats:
    """`running` and `waiting` count requests, `kv_*` tokens; `prefill_tokens` were computed, `reused_tokens` came from
    the KV cache (both since start); `tokens_per_s` is the rate of sampled tokens over the last few seconds."""

    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    sampled_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0


class RequestRefused(EngineError):
    """The engine works, but not on this request: the agent is told so, in the engine's words."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class EngineBusy(EngineError):
    """The engine cannot take the request now; `retry_after_s` is when to ask again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Engine(Protocol):
    """Where responses come from. One engine serves one policy at a time."""

    info: EngineInfo

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Chunk]:
        """Sample one response. Closing the iterator (`aclose`) cancels it. Several may run at once; prompts that share
        a token prefix with something computed before reuse its KV cache.

        Raises EngineError if the engine cannot or can no longer serve it.
        """
        ...

    async def preempt(self) -> None:
        """Stop every generation after the token it is at; they keep what they sampled and wait for `resume`."""
        ...

    async def resume(self, version: int) -> None:
        """Go on with the current weights as policy `version`; KV of older weights is recomputed first."""
        ...

    async def stats(self) -> EngineStats: ...
