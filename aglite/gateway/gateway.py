"""The gateway: text of agents in, tokens of the model out, every call recorded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import orjson

from aglite.config import GatewaySettings, Limits, TrainSampling, ValSampling
from aglite.engine.base import Engine, SamplingParams
from aglite.errors import AgliteError
from aglite.gateway.connection import Connection
from aglite.gateway.continuation import Conversations
from aglite.gateway.dialects.base import Dialect, Problem, Request, RequestError
from aglite.gateway.exchange import Exchange
from aglite.gateway.gate import Gate
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.sessions import Session, Sessions, new_token
from aglite.paths import new_id
from aglite.store import Store

log = logging.getLogger("aglite.gateway")

KEEPALIVE_S = 15.0
"""Silence in an open stream after which a keep-alive is written."""

EXTERNAL_CALLS = 2000
"""Calls after which a session of `serve_open` ends and the next call begins a new one: memory stays bounded."""

RETRIES_KEPT = 16
"""Last exchanges of a session in which a retry is looked for."""


class Gateway:
    """Serves the sessions of running rollouts from one engine. `gate` is closed by the trainer during an update."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        renderer: ChatRenderer,
        *,
        model_name: str,
        settings: GatewaySettings,
        context_length: int,
    ) -> None:
        self.engine = engine
        self.store = store
        self.renderer = renderer
        self.model_name = model_name
        self.settings = settings
        self.context_length = context_length
        self.gate = Gate(settings.max_hold_s)
        self.serve_open = False
        """`aglite serve`: a bearer token that no rollout has opens a session of its own."""
        self.sessions = Sessions()
        self._delivered: list[int] = []
        self._flusher: asyncio.Task[None] | None = None
        self._in_flight: set[Exchange] = set()
        self._ticker: asyncio.Task[None] | None = None
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
        self.sessions.remove(rollout_id)
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
        for exchange in list(session.exchanges):
            exchange.interrupt("ended")
        await session.settled()
        session.last.clear()
        await self.flush()

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
            return Problem(401, "auth", "no running rollout has this token", code="invalid_api_key")
        return session

    async def _open_external(self, token: str) -> Session:
        """A session for somebody who just came, recorded as an external rollout."""
        pending = self._opening.get(token)
        if pending is None:
            pending = self._opening[token] = asyncio.ensure_future(self._begin_external(token))
            pending.add_done_callback(lambda _: self._opening.pop(token, None))
        return await asyncio.shield(pending)

    async def _begin_external(self, token: str) -> Session:
        rollout_id = new_id("r")
        await self.store.add_rollout(rollout_id, "external", None, "serve", "external")
        limits = Limits(calls=2**31, sampled_tokens=2**31)
        session = self.open_session(rollout_id, 1, limits, None, token=token)
        await self.store.set_rollout_state(
            rollout_id, "running", attempt=1, token_hash=session.token_hash, started_at=time.time()
        )
        return session

    async def stop(self) -> None:
        """End all sessions; those that `serve_open` began end as done."""
        for session in self.sessions:
            if session.sampling is None:
                await self._end_external(session)
            else:
                await self.close_session(session.rollout_id)
        await self.flush()

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
        try:
            problem = await self._handle(session, dialect, body, connection, retry)
        except Exception as error:  # a defect of ours: the agent gets an error in its dialect, the log the traceback
            log.exception("a request of rollout %s failed", session.rollout_id)
            session.infra_error = f"{type(error).__name__}: {error}"
            problem = Problem(500, "engine", "internal error of the gateway", code="internal_error")
        if problem is None or connection.gone:
            return
        if connection.started:
            await connection.finish(dialect.error_event(problem))
        else:
            await connection.respond(problem.status, dialect.error(problem), problem.headers)

    async def _handle(
        self, session: Session, dialect: Dialect, body: bytes, connection: Connection, retry: bool
    ) -> Problem | None:
        digest = hashlib.blake2b(body, digest_size=16, person=dialect.name.encode()[:16]).digest()
        earlier = session.last.get(digest)
        if earlier is not None and await self._joined(earlier, connection, retry):
            return None
        try:
            request = dialect.parse(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            return Problem(400, "invalid", f"the request body is not valid JSON: {error}", param="body")
        except RequestError as error:
            return Problem(400, "invalid", error.message, param=error.param, code=error.code)
        exchange = Exchange(self, session, dialect, request, connection)
        session.last.pop(digest, None)
        session.last[digest] = exchange
        if len(session.last) > RETRIES_KEPT:
            del session.last[next(iter(session.last))]
        return await exchange.run()

    async def _joined(self, earlier: Exchange, connection: Connection, retry: bool) -> bool:
        """Whether the request is a retry that an earlier exchange answers. Waits for that one to end."""
        if not (retry or (earlier.connection.gone and not earlier.delivered)):
            return False
        if not earlier.done.done():
            earlier.joiners += 1
            try:
                await asyncio.shield(earlier.done)
            finally:
                earlier.joiners -= 1
        if earlier.outcome is None:
            return False
        await earlier.replay(connection)
        return True

    def sampling(self, session: Session, request: Request, max_tokens: int) -> SamplingParams:
        """How a call of the session is sampled: by the recipe in rollouts, as asked when serving."""
        stop_ids = self.renderer.stop_ids
        rule = session.sampling
        if isinstance(rule, TrainSampling):
            return SamplingParams(max_tokens, temperature=rule.temperature, stop_token_ids=stop_ids)
        seed = None if session.seed is None else derive_seed(session.seed, session.calls)
        if isinstance(rule, ValSampling):
            return SamplingParams(
                max_tokens, rule.temperature, rule.top_p, rule.top_k, rule.min_p, seed, stop_token_ids=stop_ids
            )
        asked = request.asked
        if seed is None and asked.get("seed") is not None:
            seed = derive_seed(asked["seed"], 0)
        return SamplingParams(
            max_tokens,
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p") or 1.0,
            top_k=max(0, asked.get("top_k", 0)),
            min_p=asked.get("min_p", 0.0),
            seed=seed,
            stop_token_ids=stop_ids,
        )

    def models(self) -> dict[str, Any]:
        """Body of `GET /v1/models`."""
        model = {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "aglite",
            "max_model_len": self.context_length,
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
                connection = exchange.connection
                if connection.started:
                    await connection.keep_alive(exchange.dialect.keepalive, KEEPALIVE_S)
                elif self.gate.closed and exchange.held_s > self.gate.max_hold_s:
                    exchange.interrupt("held")

    # delivery marks

    def delivered(self, call_ids: Iterable[int]) -> None:
        """Note that these replies reached their agent; written to the store in batches soon after."""
        self._delivered.extend(call_ids)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        while self._delivered:
            await asyncio.sleep(0.02)
            try:
                await self._flush_now()
            except AgliteError as error:  # they stay noted; whoever closes the session tries again and hears of it
                log.warning("calls could not be marked delivered: %s", error)
                return

    async def flush(self) -> None:
        """Write all marks that are waiting."""
        await self._flush_now()
        if self._flusher is not None and not self._flusher.done():
            await self._flusher

    async def _flush_now(self) -> None:
        ids, self._delivered = self._delivered, []
        if not ids:
            return
        try:
            await self.store.mark_delivered(ids)
        except AgliteError:
            self._delivered += ids
            raise


def derive_seed(seed: int, number: int) -> int:
    """The seed of call `number` of a rollout, an integer below 2**32."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest(), "little")
