"""One response as it grows: the engine's tokens as they are recorded, and what an agent sees of them."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aglite.engine.base import Chunk, Engine, SamplingParams
from aglite.gateway.continuation import Plan
from aglite.gateway.dialects.base import Choice, FinishReason, Request, TokenInfo
from aglite.gateway.parsers import PlainParser, ReplyParser
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.replies import Piece, Reasoning, Reply
from aglite.gateway.sessions import Session


class Sampling:
    """One response as it grows."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        request: Request,
        plan: Plan,
        session: Session,
        renderer: ChatRenderer,
    ) -> None:
        self.index = index
        self.params = params
        self.ids = array("i")
        self.logprobs = array("f")
        self.versions: list[list[int]] = []
        self.reason: str | None = None
        self.reply = Reply()
        self.infos: list[TokenInfo] = []
        self.first_token_at: float | None = None
        self.reasoning_tokens = 0
        self._plan = plan
        self._session = session
        self._tokenizer = renderer.tokenizer
        self._logprobs_asked = request.logprobs
        self._parser: ReplyParser
        if request.prompt is None:
            tools = request.tools if request.calls_tools else ()
            self._parser = renderer.parser(plan.prompt_ids, tools=tools, stops=request.stops)
        else:
            self._parser = PlainParser(renderer.tokenizer, stops=request.stops)
        self._by_token = bool(request.stops)

    @property
    def prompt_tokens(self) -> int:
        return self._plan.prompt_len

    @property
    def sampled(self) -> int:
        return len(self.ids)

    def used(self) -> dict[str, Any]:
        """What the engine was asked for, for the record."""
        return used(self.params)

    def stream(self, engine: Engine) -> AsyncIterator[Chunk]:
        """Have the engine sample it."""
        return engine.generate(self._plan.prompt_ids, self.params)

    def take(self, chunk: Chunk) -> tuple[list[Piece], list[TokenInfo]]:
        """Add what the engine sent; sets `reason` when the response has ended with it."""
        ids, logprobs, top = chunk.token_ids, chunk.logprobs, chunk.top
        if ids and self.first_token_at is None:
            self.first_token_at = time.time()
        pieces: list[Piece] = []
        if self._by_token:  # a stop string ends the response at the very token that completes it
            for used, token_id in enumerate(ids, start=1):
                pieces += self._parser.feed((token_id,))
                if self._parser.stopped:
                    ids, logprobs = ids[:used], logprobs[:used]
                    self.reason = "stop"
                    break
        elif ids:
            pieces = self._parser.feed(ids)
        if ids:
            self._count(ids, logprobs, chunk.version)
        if self.reason is None:
            self.reason = chunk.finish_reason
        self._check_limit()
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self.reasoning_tokens = len(self.ids)
        self.reply.add(pieces)
        infos = self._infos(ids, logprobs, top) if self._logprobs_asked else []
        return pieces, infos

    def finish(self) -> list[Piece]:
        pieces = self._parser.finish()
        self.reply.add(pieces)
        return pieces

    def choice(self) -> Choice:
        reason: FinishReason = "length" if self.reason == "length" else "stop"
        if reason == "stop" and self.reply.tool_calls:
            reason = "tool_calls"
        return Choice(self.index, self.reply, reason, self.infos, self.reasoning_tokens, self._parser.stopped)

    def _count(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += len(ids)
        else:
            self.versions.append([version, len(ids)])
        self._session.sampled_tokens += len(ids)

    def _check_limit(self) -> None:
        """A response that uses up the rollout's tokens is cut, here if the engine has not done it already."""
        session = self._session
        if session.sampled_tokens >= session.limits.sampled_tokens and self.reason != "stop":
            session.limits_hit.add("sampled_tokens")
            self.reason = "length"

    def _infos(
        self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]] | None
    ) -> list[TokenInfo]:
        """`top` may go on beyond a stop string that has cut `ids`."""
        infos = [
            self._info(token_id, logprob, () if top is None else top[at])
            for at, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]
        self.infos += infos
        return infos

    def _info(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenInfo:
        data = self._tokenizer.token_bytes(token_id)
        others = [self._info(other, its_logprob) for other, its_logprob in top]
        return TokenInfo(data.decode(errors="replace"), data, logprob, others)


def used(params: SamplingParams) -> dict[str, Any]:
    """The sampling in force; what is off is left out."""
    found: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    for name, off in (("seed", None), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(params, name) != off:
            found[name] = getattr(params, name)
    return found
