"""The gateway: text of agents in, tokens of the model out, every call recorded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from aglite.config import GatewaySettings, Limits, TrainSampling, ValSampling
from aglite.engine.base import Engine, SamplingParams
from aglite.gateway.connection import Connection
from aglite.gateway.continuation import Conversations
from aglite.gateway.delivery import Deliveries
from aglite.gateway.dialects.base import CountingDialect, Dialect, Problem, Request, RequestError
from aglite.gateway.exchange import Exchange
from aglite.gateway.gate import Gate
from aglite.gateway.problems import request_problem
from aglite.gateway.recall import recall
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.sessions import Session, Sessions, new_token
from aglite.gateway.text import TextRenderer
from aglite.paths import new_id
from aglite.store import Store

if TYPE_CHECKING:
    from aglite.engine.api import ApiEngine

log = logging.getLogger("aglite.gateway")

KEEPALIVE_S = 15.0
"""Silence in an open stream after which a keep-alive is written."""

NESTING = 250
"""Levels of nesting that the JSON of a request body may have."""

EXTERNAL_CALLS = 2000
"""Calls after which a session of `serve_open` ends and the next call begins a new one: memory stays bounded."""

EXTERNAL_SESSIONS = 256
"""Sessions of `serve_open` at a time; one more ends the one that has been silent for longest."""


class Gateway:
    """Serves the sessions of running rollouts from one engine. `gate` is closed by the trainer during an update."""

    def __init__(
        self,
        engine: Engine | ApiEngine,
        store: Store,
        renderer: ChatRenderer | TextRenderer,
        *,
        model_name: str,
        settings: GatewaySettings,
        context_length: int,
    ) -> None:
        self.engine = engine
        self.store = store
        self.renderer = renderer
        self.text_only = isinstance(renderer, TextRenderer)
        """Whether the model's tokens are unknown."""
        self.model_name = model_name
        self.settings = settings
        self.context_length = context_length
        self.gate = Gate(settings.max_hold_s)
        self.serve_open = False
        """`aglite serve`: a bearer token that no rollout has opens a session of its own."""
        self.sessions = Sessions()
        self.deliveries = Deliveries(store)
        self._in_flight: set[Exchange] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._keeping_alive: set[asyncio.Task[None]] = set()
        self._opening: dict[str, asyncio.Future[Session]] = {}

    # sessions

    def open_session(
        self,
        rollout_id: str,
        attempt: int,
        limits: Limits,
        sampling: TrainSampling | ValSampling | None,
        seed: int | None = None,
        *,
        token: str | None = None,
    ) -> Session:
        """Let an attempt of a rollout in; its `token` and `path` are what the agent is given. An earlier attempt's
        session ends. `sampling` None leaves it to the agent; `seed` makes its calls repeatable."""
        earlier = self.sessions.remove(rollout_id)
        if earlier is not None:
            earlier.closed = True
        session = Session(
            rollout_id,
            attempt,
            token=new_token() if token is None else token,
            limits=limits,
            sampling=sampling,
            seed=seed,
            conversations=Conversations(self.renderer, self.settings.continuation),
            gate=self.gate,
        )
        self.sessions.add(session)
        return session

    async def close_session(self, rollout_id: str) -> None:
        """End a session: its token is dead, what is in flight is cancelled. Returns when all of it is recorded."""
        session = self.sessions.remove(rollout_id)
        if session is None:
            return
        session.closed = True
        # Again and again: one that is being recorded now may find that its client reads nothing.
        while session.exchanges:
            for exchange in session.exchanges:
                exchange.interrupt("ended")
            await asyncio.wait([exchange.done for exchange in session.exchanges], timeout=0.2)
        session.retries.clear()
        await self.deliveries.flush()

    async def authenticate(self, token: str | None, rollout_id: str | None) -> Session | Problem:
        """The session of a request, from its bearer token and the rollout in its path."""
        session = self.sessions.find(token or "")
        worn = session is not None and session.sampling is None and session.calls >= EXTERNAL_CALLS
        if session is not None and worn and not session.exchanges:
            await self._end_external(session)
            session = None
        if session is None and self.serve_open and rollout_id is None:
            session = await self._open_external(token or "")
        if session is None or (rollout_id is not None and session.rollout_id != rollout_id):
            return _stranger()
        return session

    async def _open_external(self, token: str) -> Session:
        """A session for somebody who just came, recorded as an external rollout."""
        pending = self._opening.get(token)
        if pending is None:
            pending = self._opening[token] = asyncio.ensure_future(self._begin_external(token))
            pending.add_done_callback(lambda _: self._opening.pop(token, None))
        return await asyncio.shield(pending)

    async def _begin_external(self, token: str) -> Session:
        await self._make_room()
        rollout_id = new_id("r")
        await self.store.add_rollout(rollout_id, "external", None, "serve", "external")
        limits = Limits(calls=2**31, sampled_tokens=2**31)
        session = self.open_session(rollout_id, 1, limits, None, token=token)
        await self.store.set_rollout_state(
            rollout_id, "running", attempt=1, token_hash=session.token_hash, started_at=time.time()
        )
        return session

    async def _make_room(self) -> None:
        """Anybody may come by any token, so that only the number of them keeps memory bounded."""
        strangers = [session for session in self.sessions if session.sampling is None]
        idle = [session for session in strangers if not session.exchanges]
        if len(strangers) >= EXTERNAL_SESSIONS and idle:
            await self._end_external(min(idle, key=lambda session: session.used_at))

    async def stop(self) -> None:
        """End all sessions; those that `serve_open` began end as done."""
        for session in self.sessions:
            if session.sampling is None:
                await self._end_external(session)
            else:
                await self.close_session(session.rollout_id)
        await self.deliveries.stop()

    async def _end_external(self, session: Session) -> None:
        await self.close_session(session.rollout_id)
        await self.store.set_rollout_state(session.rollout_id, "done", attempt=1)

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no generation is in flight; False if some still is after `timeout_s`."""
        return await self.gate.idle(timeout_s)

    # requests

    async def handle(
        self, session: Session, dialect: Dialect, body: bytes, connection: Connection, *, retry: bool = False
    ) -> None:
        """Answer one request of a model route."""
        exchange: Exchange | None = None
        try:
            problem, exchange = await self._begin(session, dialect, body, connection, retry)
            if exchange is not None:
                problem = await exchange.run()
        except Exception as error:  # a defect of ours: the agent gets an error in its dialect, the log the traceback
            log.exception("a request of rollout %s failed", session.rollout_id)
            session.infra_error = f"{type(error).__name__}: {error}"
            problem = Problem(500, "engine", "internal error of the gateway", code="internal_error")
        if problem is None or connection.gone:
            return
        if not connection.started:
            await connection.respond(problem.status, dialect.error(problem), problem.headers)
        elif exchange is not None:
            await connection.finish(exchange.error_event(problem))

    async def _begin(
        self, session: Session, dialect: Dialect, body: bytes, connection: Connection, retry: bool
    ) -> tuple[Problem | None, Exchange | None]:
        """Read a request. Returns what is wrong with it, or the exchange that will answer it; neither if it was a retry
        that an earlier exchange has answered."""
        digest = hashlib.blake2b(body, digest_size=16, person=dialect.name.encode()[:16]).digest()
        try:
            request = parse(dialect, body)
            earlier = session.retries.find(digest, retry)
            if earlier is not None and await self._joined(session, earlier, request, connection):
                return None, None
            if session.closed:  # while the body came, or the exchange that was joined ended
                return _stranger(), None
            recall(self.store, session, request)
        except RequestError as error:
            return request_problem(error), None
        exchange = Exchange(self, session, dialect, request, connection)
        session.retries.add(digest, exchange)
        return None, exchange

    async def _joined(self, session: Session, earlier: Exchange, request: Request, connection: Connection) -> bool:
        """Answer a retry with the reply of the exchange that it repeats, when that one has ended. False if it has none.

        Sampling goes on as long as one of their clients is there.
        """
        earlier.joiners += 1
        watcher = asyncio.create_task(connection.watch(lambda: None))
        try:
            await asyncio.wait({earlier.done, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if connection.gone:
                return True
            if earlier.outcome is None:
                session.retries.forget(earlier)
                return False
            await earlier.replay(request, connection)
            return True
        finally:
            watcher.cancel()
            earlier.joiners -= 1
            if earlier.connection.gone:
                earlier.interrupt("gone")

    async def count_tokens(
        self, session: Session, dialect: CountingDialect, body: bytes, connection: Connection
    ) -> None:
        """Answer how long the prompt of a request would be. Nothing is sampled or recorded."""
        try:
            request = parse(dialect, body)
            recall(self.store, session, request)
            plan = session.plan(request)
        except RequestError as error:
            problem = request_problem(error)
        else:
            if not self.text_only:
                await connection.respond(200, dialect.count(plan.prompt_len))
                return
            problem = Problem(404, "not_found", "the tokens of this model are not known, so they cannot be counted")
        await connection.respond(problem.status, dialect.error(problem), problem.headers)

    def sampling(
        self, session: Session, request: Request, max_tokens: int, grammar: str | None = None
    ) -> SamplingParams:
        """How a call of the session is sampled: by the recipe in rollouts, as asked when serving."""
        rule = session.sampling
        params = SamplingParams(
            max_tokens,
            stop_token_ids=self.renderer.stop_ids,
            grammar=grammar,
            top_logprobs=request.top_logprobs,
            whole=not (request.stream or request.stops),
        )
        if isinstance(rule, TrainSampling):
            return replace(params, temperature=rule.temperature)
        seed = None if session.seed is None else derive_seed(session.seed, session.calls)
        if isinstance(rule, ValSampling):
            return replace(
                params, temperature=rule.temperature, top_p=rule.top_p, top_k=rule.top_k, min_p=rule.min_p, seed=seed
            )
        asked = request.asked
        if seed is None and asked.get("seed") is not None:
            seed = derive_seed(asked["seed"], 0)
        return replace(
            params,
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p") or 1.0,
            top_k=max(0, asked.get("top_k", 0)),
            min_p=asked.get("min_p", 0.0),
            seed=seed,
        )

    def models(self) -> dict[str, Any]:
        """Body of `GET /v1/models`."""
        model = {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "aglite",
            **({"max_model_len": self.context_length} if self.context_length else {}),
        }
        return {"object": "list", "data": [model]}

    # what is in flight

    def watch(self, exchange: Exchange) -> None:
        """Look after a request until it is done: keep-alives, and an end to holds that outlast the limit."""
        self._in_flight.add(exchange)
        exchange.done.add_done_callback(lambda _: self._in_flight.discard(exchange))
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        period = min(1.0, self.gate.max_hold_s / 4)
        while self._in_flight:
            await asyncio.sleep(period)
            for exchange in list(self._in_flight):
                waits = exchange.sampling and not exchange.connection.started  # one at the gate has its own time there
                if waits and self.gate.closed and exchange.held_s > self.gate.max_hold_s:
                    exchange.interrupt("held")
                elif exchange.silent(KEEPALIVE_S):  # in a task of its own: a client may have stopped reading
                    task = asyncio.create_task(exchange.keep_alive())
                    self._keeping_alive.add(task)
                    task.add_done_callback(self._keeping_alive.discard)


def _stranger() -> Problem:
    return Problem(401, "auth", "no running rollout has this token", code="invalid_api_key")


def parse(dialect: Dialect, body: bytes) -> Request:
    """Read a request body. Raises RequestError."""
    try:
        decoded = orjson.loads(body)
        if body.count(b"{") + body.count(b"[") > NESTING:
            orjson.dumps([[[[decoded]]]])  # parts of it are written into replies and records, some levels down
    except orjson.JSONDecodeError as error:
        raise RequestError("body", f"the request body is not valid JSON: {error}") from error
    except orjson.JSONEncodeError as error:  # orjson reads 1024 levels and writes 255
        raise RequestError("body", f"the request body is nested more than {NESTING} levels deep") from error
    return dialect.parse(decoded)


def derive_seed(seed: int, number: int) -> int:
    """The seed of call `number` of a rollout, an integer below 2**32."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest(), "little")
