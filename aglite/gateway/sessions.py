"""Who may ask: one session for each attempt of a rollout, known by its token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING

from aglite.config import Limits, TrainSampling, ValSampling
from aglite.gateway.continuation import Conversations, Plan
from aglite.gateway.dialects.base import Request
from aglite.gateway.gate import Gate
from aglite.gateway.retries import Retries

if TYPE_CHECKING:
    from aglite.gateway.exchange import Exchange


class Session:
    """One attempt of a rollout: its conversations, limits and counters."""

    def __init__(
        self,
        rollout_id: str,
        attempt: int,
        *,
        token: str,
        limits: Limits,
        sampling: TrainSampling | ValSampling | None,
        seed: int | None,
        conversations: Conversations,
        gate: Gate,
    ) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.token = token
        """The bearer token in plain text; only its hash is ever stored."""
        self.token_hash = hash_token(token)
        self.path = f"/rollouts/{rollout_id}"
        self.limits = limits
        self.sampling = sampling
        """None: what the agent asks for (serving)."""
        self.seed = seed
        self.conversations = conversations
        self.calls = 0
        """Responses begun; each of n completions counts."""
        self.sampled_tokens = 0
        self.limits_hit: set[str] = set()
        """Of "calls" and "sampled_tokens"."""
        self.infra_error: str | None = None
        """Set while the last call ended in an error of ours (5xx)."""
        self.closed = False
        """It has ended: what was on its way to it by then is turned away."""
        self.used_at = time.monotonic()
        """When a request last began or ended."""
        self.exchanges: set[Exchange] = set()
        """Requests being answered."""
        self.retries = Retries()
        self._gate = gate
        self._open = 0
        self._held = 0.0
        self._mark = 0.0

    @property
    def held_s(self) -> float:
        """Seconds in which the gate was closed while a request of the session was open."""
        return self._held + (self._gate.closed_s() - self._mark if self._open else 0.0)

    def plan(self, request: Request) -> Plan:
        """The prompt of a request. Raises RequestError if it has token ids that the model has not."""
        if request.prompt is not None:
            return self.conversations.plan_text(request.prompt)
        return self.conversations.plan(request.messages, request.tools)

    def request_began(self) -> None:
        if self._open == 0:
            self._mark = self._gate.closed_s()
        self._open += 1
        self.used_at = time.monotonic()

    def request_ended(self) -> None:
        self._open -= 1
        self.used_at = time.monotonic()
        if self._open == 0:
            self._held += self._gate.closed_s() - self._mark


class Sessions:
    """The living sessions, found by token or by rollout."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Session] = {}
        self._by_rollout: dict[str, Session] = {}

    def add(self, session: Session) -> None:
        self._by_hash[session.token_hash] = session
        self._by_rollout[session.rollout_id] = session

    def remove(self, rollout_id: str) -> Session | None:
        session = self._by_rollout.pop(rollout_id, None)
        if session is not None:
            self._by_hash.pop(session.token_hash, None)
        return session

    def find(self, token: str) -> Session | None:
        """The session of a token. Looked up by its hash, compared in constant time."""
        digest = hash_token(token)
        session = self._by_hash.get(digest)
        if session is None or not hmac.compare_digest(session.token_hash, digest):
            return None
        return session

    def of_rollout(self, rollout_id: str) -> Session | None:
        return self._by_rollout.get(rollout_id)

    def __len__(self) -> int:
        return len(self._by_rollout)

    def __iter__(self):
        return iter(list(self._by_rollout.values()))


def new_token() -> str:
    return f"aglite-{secrets.token_urlsafe(24)}"


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
