"""Conversations with a model of which only the text is known (engine.kind: api): recorded without tokens."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from aglite.engine.base import SamplingParams
from aglite.gateway.dialects.base import Choice, FinishReason, Request, TokenInfo
from aglite.gateway.replies import Piece, Reply
from aglite.gateway.sampling import used
from aglite.gateway.sessions import Session

if TYPE_CHECKING:
    from aglite.engine.api import ApiEngine, TextChunk


class TextRenderer:
    """Stands where a renderer does: every prompt has no tokens, and every conversation can be continued so."""

    stop_ids: tuple[int, ...] = ()
    family = "text"
    keeps_call_ids = False

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        return []

    def bridge(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        new: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        return []


class TextSampling:
    """One reply as it grows; what `Sampling` is for tokens."""

    def __init__(self, index: int, params: SamplingParams, request: Request, session: Session) -> None:
        self.index = index
        self.params = params
        self.ids = array("i")
        self.logprobs = array("f")
        self.versions: list[list[int]] = []
        self.reason: FinishReason | None = None
        self.reply = Reply()
        self.infos: list[TokenInfo] = []
        self.first_token_at: float | None = None
        self.prompt_tokens = 0
        self.sampled = 0
        self._request = request
        self._session = session
        self._model = ""

    def stream(self, engine: ApiEngine) -> AsyncIterator[TextChunk]:
        self._model = engine.info.model
        return engine.chat(self._request, self.params)

    def take(self, chunk: TextChunk) -> tuple[list[Piece], list[TokenInfo]]:
        if chunk.pieces and self.first_token_at is None:
            self.first_token_at = time.time()
        if chunk.usage is not None:
            self.prompt_tokens, self.sampled = chunk.usage
            self._session.sampled_tokens += self.sampled
        self.reply.add(chunk.pieces)
        self.infos += chunk.infos
        self.reason = chunk.finish_reason
        return chunk.pieces, chunk.infos

    def finish(self) -> list[Piece]:
        return []

    def choice(self) -> Choice:
        reason: FinishReason = self.reason or "stop"
        if reason == "stop" and self.reply.tool_calls:
            reason = "tool_calls"
        return Choice(self.index, self.reply, reason, self.infos)

    def used(self) -> dict[str, Any]:
        """What the endpoint was asked for, and what it counted."""
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sampled}
        return {**used(self.params), "model": self._model, "usage": usage}
