"""What a dialect translates to and from: one internal request, one internal reply, one kind of problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aglite.gateway.replies import Piece, Reply

INSTRUCTIONS = "instructions"
"""Set in `Request.asked` when the first message was given as instructions: they hold for one request only."""

QUOTED = "reply_id"
"""In a message of a request: it stands for the whole reply that was recorded under this id."""

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
    must_call: tuple[str, ...] = ()
    """Names of tools of which the reply must call one (`tool_choice: required`, or a named one)."""
    one_call: bool = False
    """At most one tool call is wanted (`parallel_tool_calls: false`); holds where a call is forced."""
    schema: dict[str, Any] | None = None
    """JSON schema that the reply's text must satisfy (`response_format`); {"type": "object"} for any JSON object."""
    schema_strict: bool = False
    """Whether a schema that can only be enforced in part is refused."""
    schema_field: str = "response_format"
    """Where the schema stands in the request, for errors."""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the most probable tokens to show beside each sampled one."""
    previous: str | None = None
    """Id of an earlier reply whose whole conversation comes before `messages` (`previous_response_id`)."""
    reply_id: str | None = None
    """The id that the reply will have, where it is made before the reply is."""
    nameable: bool = False
    """Whether a later request may name the reply by its id: it is recorded then."""
    model: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    """The sampling and format that were asked for, as they are recorded."""
    prompt_tokens: int = 0
    """Length of the prompt, once it is made."""
    memo: Any = None
    """What the dialect's own writer needs to know of the request."""

    @property
    def constrained_by(self) -> str:
        """The field that says what the reply must look like; "" if it is free."""
        return "tool_choice" if self.must_call else "" if self.schema is None else self.schema_field


@dataclass(slots=True, frozen=True)
class TokenInfo:
    """One sampled token as an agent may see it."""

    text: str
    bytes: bytes
    logprob: float
    top: Sequence[TokenInfo] = ()
    """The most probable tokens in its place, if asked for."""


@dataclass(slots=True)
class Choice:
    """One finished response of a request."""

    index: int
    reply: Reply
    finish_reason: FinishReason
    tokens: Sequence[TokenInfo] = ()
    """Filled only if log-probabilities were asked for."""
    reasoning_tokens: int = 0
    """How many tokens were sampled until the reasoning ended."""
    stop: str = ""
    """The stop string that ended it."""


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

    def keep_alive(self) -> bytes:
        """Something that a client of an open stream skips, and that resets its patience."""
        ...

    def error(self, problem: Problem) -> bytes:
        """The event that ends an open stream which failed."""
        ...


class Dialect(Protocol):
    name: str

    def parse(self, body: Any) -> Request:
        """Read a decoded JSON body. Raises RequestError."""
        ...

    def writer(self, request: Request, model: str) -> Writer: ...

    def error(self, problem: Problem) -> bytes:
        """The body of an error response."""
        ...

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        """The prompt leaves no room for a response: in the words that make agents compact their history."""
        ...


class CountingDialect(Dialect, Protocol):
    """For a request of which only the length of its prompt is asked."""

    def count(self, tokens: int) -> bytes:
        """The body of the answer."""
        ...
