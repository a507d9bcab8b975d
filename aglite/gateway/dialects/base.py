"""What a dialect translates to and from: one internal request, one internal reply, one kind of problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aglite.gateway.replies import Piece, Reply

FinishReason = Literal["stop", "length", "tool_calls"]


class RequestError(Exception):
    """A request that cannot be served as it is: `param` names the field."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


@dataclass(slots=True)
class Request:
    """What an agent asked for, whatever the dialect.

    Messages are in normal form: `content` is a string, roles are system, user, assistant and tool, an assistant's
    `tool_calls` carry their arguments as JSON text, reasoning is `reasoning_content`. Text completion has a `prompt`
    (text or token ids) and no messages.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls_tools: bool = True
    """False: tool calls in the reply stay text (`tool_choice: none`)."""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    model: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    """The sampling and format that were asked for, as they are recorded."""


@dataclass(slots=True, frozen=True)
class TokenInfo:
    """One sampled token as an agent may see it."""

    text: str
    bytes: bytes
    logprob: float


@dataclass(slots=True)
class Choice:
    """One finished response of a request."""

    index: int
    reply: Reply
    finish_reason: FinishReason
    tokens: Sequence[TokenInfo] = ()
    """Filled only if log-probabilities were asked for."""


@dataclass(slots=True)
class Outcome:
    """All of a reply. Token counts equal what is recorded."""

    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int


ProblemKind = Literal[
    "invalid", "auth", "not_found", "method", "too_large", "limit", "context_length", "held", "engine", "store", "ended"
]


@dataclass(slots=True)
class Problem:
    """Why there is no reply. Each dialect gives it its own shape."""

    status: int
    kind: ProblemKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after_s is not None:
            return [(b"retry-after", str(self.retry_after_s).encode())]
        # The official SDKs try again on some codes unless told not to.
        return [(b"x-should-retry", b"false")] if self.status < 500 else []


class Writer(Protocol):
    """Writes one reply in the dialect's form. Stateful, pure: bytes out, nothing sent."""

    def open(self) -> bytes:
        """The events before the first piece of a stream."""
        ...

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        """The events of some pieces of choice `index`; b"" if they make none."""
        ...

    def close(self, outcome: Outcome) -> bytes:
        """The events that end a stream, the terminal one last."""
        ...

    def body(self, outcome: Outcome) -> bytes:
        """The reply that is no stream."""
        ...


class Dialect(Protocol):
    name: str
    keepalive: bytes
    """Something a client of a stream skips."""

    def parse(self, body: Any) -> Request:
        """Read a decoded JSON body. Raises RequestError."""
        ...

    def writer(self, request: Request, model: str) -> Writer: ...

    def error(self, problem: Problem) -> bytes:
        """The body of an error response."""
        ...

    def error_event(self, problem: Problem) -> bytes:
        """The same in the middle of a stream."""
        ...

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        """The prompt leaves no room for a response: in the words that make agents compact their history."""
        ...
