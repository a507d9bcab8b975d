"""One request on its way: matched, held, sampled, recorded, delivered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from typing import TYPE_CHECKING, Any, Literal

from aglite.errors import AgliteError, EngineError
from aglite.gateway.connection import Connection
from aglite.gateway.continuation import Call, Plan
from aglite.gateway.dialects.base import Dialect, Outcome, Problem, Request, RequestError, TokenInfo, Writer
from aglite.gateway.gate import HeldTooLong
from aglite.gateway.grammar import grammar_of
from aglite.gateway.problems import (
    engine_problem,
    held_problem,
    limit_problem,
    request_problem,
    unconstrained_problem,
)
from aglite.gateway.replies import Piece
from aglite.gateway.sampling import Sampling
from aglite.gateway.sessions import Session
from aglite.gateway.text import TextSampling
from aglite.store.records import CallRecord

if TYPE_CHECKING:
    from aglite.gateway.gateway import Gateway


Interruption = Literal["gone", "held", "ended"]


class Exchange:
    """Runs in the task of its HTTP request. Others may join it: retries of the same request."""

    def __init__(
        self, gateway: Gateway, session: Session, dialect: Dialect, request: Request, connection: Connection
    ) -> None:
        self.gateway = gateway
        self.session = session
        self.dialect = dialect
        self.request = request
        self.connection = connection
        self.plan: Plan
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outcome: Outcome | None = None
        """The whole reply, once it is recorded."""
        self.delivered = False
        """Whether its terminal event was written while a client was connected."""
        self.joiners = 0
        self._held_before = gateway.gate.closed_s()
        self._started_at = time.time()
        self._samplings: list[Sampling] | list[TextSampling] = []
        self._calls: list[Call] = []
        self._writer: Writer
        self._task = asyncio.current_task()
        self._sampling_since = 0.0
        self._interruptible = True
        self._delivering = False
        self._why: Interruption | None = None

    @property
    def held_s(self) -> float:
        """Seconds in which the gate was closed while this request was open."""
        return self.gateway.gate.closed_s() - self._held_before

    @property
    def sampling(self) -> bool:
        """Whether it is through the gate, or has been."""
        return bool(self._sampling_since)

    def interrupt(self, why: Interruption) -> None:
        """Stop sampling; what was sampled is recorded. Or stop waiting for a client that does not read its reply."""
        able = self._interruptible or (self._delivering and why == "ended")
        if not able or self._why is not None or (why == "gone" and self.joiners):
            return
        self._why = why
        assert self._task is not None
        self._task.cancel()

    async def run(self) -> Problem | None:
        """Answer the request. Returns the problem if there is no reply; the caller words it for the client."""
        watcher = asyncio.create_task(self.connection.watch(lambda: self.interrupt("gone")))
        self.session.request_began()
        self.session.exchanges.add(self)
        self.gateway.watch(self)
        try:
            problem = await self._answer()
            if problem is not None and problem.status >= 500:
                self.session.infra_error = problem.message
            elif problem is None:
                self.session.infra_error = None
            return problem
        finally:
            self._interruptible = False
            watcher.cancel()
            self.session.exchanges.discard(self)
            self.session.request_ended()
            self.done.set_result(None)
            # Exchanges are kept a while for retries, but not the history with them.
            self.request.messages, self.request.tools, self.request.prompt, self.request.memo = [], [], None, None
            self._samplings.clear()
            self.__dict__.pop("plan", None)

    async def _answer(self) -> Problem | None:
        problem = await self._prepare()
        if problem is not None:
            return problem
        failure: Problem | None = None
        try:
            async with self.gateway.gate.through():
                self._sampling_since = time.monotonic()
                await self._sample_all()
        except HeldTooLong as held:
            failure = held_problem(self.gateway.gate.max_hold_s, held.retry_after_s)
        except EngineError as error:
            failure = engine_problem(self.dialect, self.request, error)
        except asyncio.CancelledError:
            if self._why is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            failure = self._interruption()
        except BaseExceptionGroup as group:  # of several completions, one failed and took the others with it
            engine_errors = group.subgroup(EngineError)
            if engine_errors is None:
                raise
            failure = engine_problem(self.dialect, self.request, engine_errors.exceptions[0])
        self._interruptible = False
        closing = [sampling.finish() for sampling in self._samplings] if failure is None else []
        try:
            await self._record(failure)
        except AgliteError as error:
            return Problem(500, "store", f"the call could not be recorded: {error.message}", code="store_error")
        if failure is not None:
            return failure
        await self._deliver(closing)
        return None

    async def _prepare(self) -> Problem | None:
        """Find the prompt and check the limits."""
        session, request, gateway = self.session, self.request, self.gateway
        limits = session.limits
        if session.calls + request.n > limits.calls:
            session.limits_hit.add("calls")
            return limit_problem("calls", f"this rollout may make {limits.calls} model calls, they are used up")
        budget = limits.sampled_tokens - session.sampled_tokens
        if budget <= 0:
            session.limits_hit.add("sampled_tokens")
            return limit_problem(
                "sampled_tokens", f"this rollout may sample {limits.sampled_tokens} tokens, they are used up"
            )
        if request.prompt is not None and gateway.text_only:
            return Problem(400, "invalid", "text completion needs a model whose tokens are known", param="prompt")
        grammar = None
        try:
            self.plan = session.plan(request)
            request.prompt_tokens = self.plan.prompt_len
            room = (gateway.context_length or 2**31) - self.plan.prompt_len
            if room <= 0:
                return self.dialect.context_problem(request, self.plan.prompt_len, gateway.context_length)
            if request.constrained_by and not gateway.text_only:
                if not gateway.engine.info.constrains:
                    return unconstrained_problem(request, gateway.engine.info.kind)
                grammar = grammar_of(request, gateway.renderer, self.plan.prompt_ids)
        except RequestError as error:
            return request_problem(error)
        tokens = min(room, budget, request.max_tokens or room)
        for index in range(request.n):
            params = gateway.sampling(session, request, tokens, grammar)
            if gateway.text_only:
                self._samplings.append(TextSampling(index, params, request, session))
            else:
                self._samplings.append(Sampling(index, params, request, self.plan, session, gateway.renderer))
            session.calls += 1
        self._writer = self.dialect.writer(request, request.model or gateway.model_name)
        return None

    # sampling

    async def _sample_all(self) -> None:
        if len(self._samplings) == 1:
            await self._sample(self._samplings[0])
            return
        async with asyncio.TaskGroup() as group:
            for sampling in self._samplings:
                group.create_task(self._sample(sampling))

    async def _sample(self, sampling: Any) -> None:
        stream = sampling.stream(self.gateway.engine)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for chunk in stream:
                pieces, infos = sampling.take(chunk)
                if self.request.stream and (pieces or infos or not self.connection.started):
                    await self._stream(sampling.index, pieces, infos)
                if sampling.reason is not None:
                    return
        raise EngineError("the engine ended a response without a reason")

    async def _stream(self, index: int, pieces: list[Piece], infos: list[TokenInfo]) -> None:
        data = b"" if self.connection.started else self._writer.open()
        data += self._writer.pieces(index, pieces, infos)
        if data:
            await self.connection.write(data)

    def _interruption(self) -> Problem:
        if self._why == "held":
            return held_problem(self.gateway.gate.max_hold_s, HeldTooLong.retry_after_s)
        if self._why == "ended":
            return Problem(401, "ended", "this rollout has ended", code="rollout_ended")
        return Problem(499, "ended", "the client closed the connection")

    # recording

    async def _record(self, failure: Problem | None) -> None:
        """Commit every response of the request to the store. A failed request without tokens leaves one row."""
        samplings = self._samplings
        if failure is not None:
            samplings = [sampling for sampling in samplings if sampling.ids] or samplings[:1]
        first: Call | None = None
        for sampling in samplings:  # one after another: the later ones take the first one's prompt as their base
            record = self._call_record(sampling, failure, first)
            call_id = await self.gateway.store.add_call(record)
            call = self.session.conversations.record(
                self.plan,
                sampling.ids.tobytes(),
                record.reply_message,
                call_id,
                delivered=False,
                continuable=failure is None,
            )
            self._calls.append(call)
            first = first or call
        if failure is None:
            tokens = sum(sampling.sampled for sampling in samplings)
            choices = [sampling.choice() for sampling in samplings]
            self.outcome = Outcome(choices, samplings[0].prompt_tokens, tokens)
        earlier = self.session.conversations.undelivered(self.plan.matched)
        if earlier:
            self.gateway.deliveries.note(earlier)

    def _call_record(self, sampling: Sampling, failure: Problem | None, first: Call | None) -> CallRecord:
        plan, session = self.plan, self.session
        status = "ok" if failure is None else ("error" if self._why is None else "cancelled")
        base = plan.base if first is None else first
        return CallRecord(
            rollout_id=session.rollout_id,
            attempt=session.attempt,
            parent_id=plan.parent.id if plan.parent else None,
            matched_id=plan.matched.id if plan.matched else None,
            fork_cause=plan.cause,
            base_id=base.id if base else None,
            base_len=plan.base_len if first is None else plan.prompt_len,
            base_messages=plan.base_messages if first is None else len(plan.messages),
            new_prompt_ids=plan.new_prompt_ids if first is None else array("i"),
            new_messages=plan.new_messages if first is None else (),
            prompt_len=plan.prompt_len,
            response_ids=sampling.ids,
            logprobs=sampling.logprobs,
            versions=sampling.versions,
            dialect=self.dialect.name,
            reply_message=sampling.reply.message() if failure is None else None,
            reply_id=self.request.reply_id if failure is None and self.request.nameable else None,
            request=self._asked(sampling),
            finish_reason=sampling.choice().finish_reason if failure is None else "",
            status=status,
            error="" if failure is None else failure.message,
            constrained=sampling.params.grammar is not None,
            held_s=self.held_s,
            started_at=self._started_at,
            first_token_at=sampling.first_token_at,
            finished_at=time.time(),
        )

    def _asked(self, sampling: Sampling) -> dict[str, Any]:
        """What the agent asked for, and what the engine was asked for in its place."""
        request = self.request
        asked: dict[str, Any] = dict(request.asked)
        asked.update(model=request.model, stream=request.stream, max_tokens=request.max_tokens)
        if request.stops:
            asked["stop"] = list(request.stops)
        if request.tools:
            asked["tools"] = [tool["function"]["name"] for tool in request.tools]
        return {"asked": asked, "used": sampling.used()}

    # delivery

    async def _deliver(self, closing: list[list[Piece]]) -> None:
        assert self.outcome is not None
        if self.connection.gone:
            return
        self._delivering = True
        try:
            await self._write_reply(closing)
        except asyncio.CancelledError:
            if self._why is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            return
        finally:
            self._delivering = False
        if self.connection.complete:
            self.mark_delivered()

    async def _write_reply(self, closing: list[list[Piece]]) -> None:
        assert self.outcome is not None
        if self.request.stream:
            data = b"" if self.connection.started else self._writer.open()
            for sampling, pieces in zip(self._samplings, closing, strict=True):
                data += self._writer.pieces(sampling.index, pieces, ())
            await self.connection.finish(data + self._writer.close(self.outcome))
        else:
            await self.connection.respond(200, self._writer.body(self.outcome))

    def silent(self, silent_s: float) -> bool:
        """Whether a stream has had nothing written to it for so long. One that waits for its first token counts, but
        not while the gate holds it: a hold that lasts too long must still be able to end in an error."""
        if self.connection.started:
            return self.connection.silent(silent_s)
        waits = self.request.stream and self.sampling
        return waits and time.monotonic() - self._sampling_since >= silent_s

    async def keep_alive(self) -> None:
        """Write something into a silent stream; one that waits for its first token is opened."""
        if self.connection.started:
            await self.connection.keep_alive(self._writer.keep_alive)
        else:
            await self.connection.write(self._writer.open())

    def error_event(self, problem: Problem) -> bytes:
        """What ends the stream that was opened, when there is no whole reply."""
        return self._writer.error(problem)

    async def replay(self, request: Request, connection: Connection) -> None:
        """Give the recorded reply to a retry: `request` is the same once more."""
        assert self.outcome is not None
        request.reply_id, request.prompt_tokens = self.request.reply_id, self.outcome.prompt_tokens
        writer = self.dialect.writer(request, request.model or self.gateway.model_name)
        if request.stream:
            data = writer.open()
            for choice in self.outcome.choices:
                data += writer.pieces(choice.index, choice.reply.pieces(), choice.tokens)
            await connection.finish(data + writer.close(self.outcome))
        else:
            await connection.respond(200, writer.body(self.outcome))
        if connection.complete:
            self.mark_delivered()

    def mark_delivered(self) -> None:
        self.delivered = True
        fresh = [call for call in self._calls if not call.delivered]
        for call in fresh:
            call.delivered = True
        if fresh:
            self.gateway.deliveries.note([call.id for call in fresh])
