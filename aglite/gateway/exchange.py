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
from aglite.gateway.dialects.base import Dialect, Outcome, Problem, Request, TokenInfo, Writer
from aglite.gateway.gate import HeldTooLong
from aglite.gateway.replies import Piece
from aglite.gateway.sampling import Sampling
from aglite.gateway.sessions import Session
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
        self._samplings: list[Sampling] = []
        self._calls: list[Call] = []
        self._writer: Writer
        self._task = asyncio.current_task()
        self._interruptible = True
        self._why: Interruption | None = None

    @property
    def held_s(self) -> float:
        """Seconds in which the gate was closed while this request was open."""
        return self.gateway.gate.closed_s() - self._held_before

    def interrupt(self, why: Interruption) -> None:
        """Stop sampling; what was sampled is recorded."""
        if not self._interruptible or self._why is not None or (why == "gone" and self.joiners):
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
            self.request.messages, self.request.tools, self.request.prompt = [], [], None
            self._samplings.clear()
            self.__dict__.pop("plan", None)

    async def _answer(self) -> Problem | None:
        problem = await self._prepare()
        if problem is not None:
            return problem
        failure: Problem | None = None
        try:
            async with self.gateway.gate.through():
                await self._sample_all()
        except HeldTooLong as held:
            failure = self._held_problem(held.retry_after_s)
        except EngineError as error:
            failure = Problem(
                503, "engine", f"the engine failed: {error.message}", code="engine_error", retry_after_s=5
            )
        except asyncio.CancelledError:
            if self._why is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            failure = self._interruption()
        except BaseExceptionGroup as group:  # of several completions, one failed and took the others with it
            engine_errors = group.subgroup(EngineError)
            if engine_errors is None:
                raise
            failure = engine_problem(engine_errors.exceptions[0])
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
        if request.prompt is None:
            self.plan = session.conversations.plan(request.messages, request.tools)
        else:
            self.plan = session.conversations.plan_text(request.prompt)
        room = gateway.context_length - self.plan.prompt_len
        if room <= 0:
            return self.dialect.context_problem(request, self.plan.prompt_len, gateway.context_length)
        tokens = min(room, budget, request.max_tokens or room)
        for index in range(request.n):
            params = gateway.sampling(session, request, tokens)
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

    async def _sample(self, sampling: Sampling) -> None:
        stream = self.gateway.engine.generate(self.plan.prompt_ids, sampling.params)
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
            return self._held_problem(HeldTooLong.retry_after_s)
        if self._why == "ended":
            return Problem(401, "ended", "this rollout has ended", code="rollout_ended")
        return Problem(499, "ended", "the client closed the connection")

    def _held_problem(self, retry_after_s: int) -> Problem:
        return Problem(
            503,
            "held",
            f"the model is being updated; the request was held for {self.gateway.gate.max_hold_s:g} s",
            code="held_too_long",
            retry_after_s=retry_after_s,
        )

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
            tokens = sum(len(sampling.ids) for sampling in samplings)
            self.outcome = Outcome([sampling.choice() for sampling in samplings], self.plan.prompt_len, tokens)
        earlier = self.session.conversations.undelivered(self.plan.matched)
        if earlier:
            self.gateway.delivered(earlier)

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
            request=self._asked(sampling),
            finish_reason=sampling.choice().finish_reason if failure is None else "",
            status=status,
            error="" if failure is None else failure.message,
            held_s=self.held_s,
            started_at=self._started_at,
            first_token_at=sampling.first_token_at,
            finished_at=time.time(),
        )

    def _asked(self, sampling: Sampling) -> dict[str, Any]:
        """What the agent asked for, and what the engine was asked for in its place."""
        request, params = self.request, sampling.params
        asked: dict[str, Any] = dict(request.asked)
        asked.update(model=request.model, stream=request.stream, max_tokens=request.max_tokens)
        if request.stops:
            asked["stop"] = list(request.stops)
        if request.tools:
            asked["tools"] = [tool["function"]["name"] for tool in request.tools]
        used: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
        if params.seed is not None:
            used["seed"] = params.seed
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(params, name) != off:
                used[name] = getattr(params, name)
        return {"asked": asked, "used": used}

    # delivery

    async def _deliver(self, closing: list[list[Piece]]) -> None:
        assert self.outcome is not None
        if self.connection.gone:
            return
        if self.request.stream:
            data = b"" if self.connection.started else self._writer.open()
            for sampling, pieces in zip(self._samplings, closing, strict=True):
                data += self._writer.pieces(sampling.index, pieces, ())
            await self.connection.finish(data + self._writer.close(self.outcome))
        else:
            await self.connection.respond(200, self._writer.body(self.outcome))
        if self.connection.complete:
            self.mark_delivered()

    async def replay(self, connection: Connection) -> None:
        """Give the recorded reply to a retry of the request."""
        assert self.outcome is not None
        writer = self.dialect.writer(self.request, self.request.model or self.gateway.model_name)
        if self.request.stream:
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
            self.gateway.delivered([call.id for call in fresh])


def limit_problem(name: str, message: str) -> Problem:
    return Problem(403, "limit", message, code=f"rollout_limit_{name}")


def engine_problem(error: BaseException) -> Problem:
    reason = error.message if isinstance(error, AgliteError) else str(error)
    return Problem(503, "engine", f"the engine failed: {reason}", code="engine_error", retry_after_s=5)
