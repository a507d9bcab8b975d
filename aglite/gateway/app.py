"""The model routes as a plain ASGI application: a request is routed and read here, all else is the gateway's.

No framework on this path: validation models and dependency graphs cost more than the whole of the work per call.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from aglite.gateway.connection import Connection, Receive, Send
from aglite.gateway.dialects.base import CountingDialect, Dialect, Problem
from aglite.gateway.dialects.chat import ChatDialect
from aglite.gateway.dialects.completions import CompletionsDialect
from aglite.gateway.dialects.messages import CountTokensDialect, MessagesDialect
from aglite.gateway.dialects.messages_writer import models_body
from aglite.gateway.dialects.responses import InputTokensDialect, ResponsesDialect
from aglite.gateway.gateway import Gateway
from aglite.gateway.retrieval import retrieve

BODY_TIMEOUT_S = 120.0
"""Longest time that the body of a request may take to arrive."""

_PREFIX = "/rollouts/"
_RECORDED = "/responses/"
_OPENAPI = Path(__file__).with_name("openapi.json")


class ModelApp:
    """Routes under `/rollouts/<id>/v1/` and, as the token names the rollout too, under `/v1/`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._chat, self._messages = ChatDialect(), MessagesDialect()
        self._dialects: dict[str, Dialect] = {
            "/chat/completions": self._chat,
            "/completions": CompletionsDialect(),
            "/responses": ResponsesDialect(),
            "/messages": self._messages,
        }
        self._counting: dict[str, CountingDialect] = {
            "/messages/count_tokens": CountTokensDialect(),
            "/responses/input_tokens": InputTokensDialect(),
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        method = scope["method"]
        connection = Connection(receive, send)
        if method == "GET" and scope["path"].endswith("/openapi.json"):
            await connection.respond(200, _OPENAPI.read_bytes())
            return
        if method == "HEAD":  # some clients ask for the base URL to see whether anybody is there
            await connection.respond(200, b"")
            return
        rollout_id, route = split_path(scope["path"])
        counting = self._counting.get(route)
        if counting is None and route.startswith(_RECORDED):
            await self._recorded(scope, rollout_id, route.removeprefix(_RECORDED), connection)
            return
        dialect = counting or self._dialects.get(route)
        token, retry, anthropic = _headers(scope["headers"])
        problem: Problem | None = None
        if dialect is None and route != "/models" and not route.startswith("/models/"):
            problem = Problem(404, "not_found", f"there is no route {scope['path']}", code="not_found")
        elif method != ("GET" if dialect is None else "POST"):
            problem = Problem(405, "method", f"{scope['path']} does not take {method}", code="method_not_allowed")
        else:
            session = await self._gateway.authenticate(token, rollout_id)
            if isinstance(session, Problem):
                problem = session
            elif dialect is None:
                await connection.respond(200, self._models(route, anthropic))
                return
            else:
                try:
                    body = await read_body(scope, connection, session.limits.request_bytes)
                except ConnectionResetError:
                    return
                if isinstance(body, bytes) and counting is not None:
                    await self._gateway.count_tokens(session, counting, body, connection)
                    return
                if isinstance(body, bytes):
                    await self._gateway.handle(session, dialect, body, connection, retry=retry)
                    return
                problem = body
        speaking = dialect or (self._messages if anthropic else self._chat)
        answer = connection.refuse if problem.kind == "too_large" else connection.respond
        await answer(problem.status, speaking.error(problem), problem.headers)

    async def _recorded(self, scope: dict[str, Any], rollout_id: str | None, path: str, connection: Connection) -> None:
        """A response that was given before."""
        session = await self._gateway.authenticate(_headers(scope["headers"])[0], rollout_id)
        found: bytes | Problem = (
            session
            if isinstance(session, Problem)
            else retrieve(self._gateway.store, session, scope["method"], path, scope["query_string"])
        )
        if isinstance(found, Problem):
            await connection.respond(found.status, self._chat.error(found), found.headers)
        else:
            await connection.respond(200, found)

    def _models(self, route: str, anthropic: bool) -> bytes:
        if anthropic:
            return models_body(self._gateway.model_name, self._gateway.context_length, one=route != "/models")
        models = self._gateway.models()
        return orjson.dumps(models if route == "/models" else models["data"][0])


def create_model_app(gateway: Gateway) -> ModelApp:
    """The ASGI application for agents: model routes only."""
    return ModelApp(gateway)


async def read_body(scope: dict[str, Any], connection: Connection, limit: int) -> bytes | Problem:
    """The body of a request, or what is wrong with it. Raises ConnectionResetError if it breaks off."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            what = value.decode("latin-1")
            return Problem(415, "too_large", f"the body is compressed ({what}); send it as it is", param="body")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await connection.read_body(limit)
    except TimeoutError:
        return Problem(408, "too_large", f"the request body did not arrive within {BODY_TIMEOUT_S:g} s", param="body")
    if body is None:
        return Problem(413, "too_large", f"the request body is longer than {limit} bytes", param="body")
    return body


def split_path(path: str) -> tuple[str | None, str]:
    """The rollout named in a path and the route after it, without `/v1`: some clients' base URL leaves that out."""
    rollout_id = None
    if path.startswith(_PREFIX):
        rollout_id, _, rest = path[len(_PREFIX) :].partition("/")
        path = f"/{rest}"
    return rollout_id, path.removeprefix("/v1").rstrip("/") or "/"


def _headers(headers: list[tuple[bytes, bytes]]) -> tuple[str | None, bool, bool]:
    """Token, whether the client says that it is trying again, and whether it is one of Anthropic's API."""
    token, retry, anthropic = None, False, False
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                token = rest.strip().decode("latin-1")
        elif name == b"x-api-key":
            token = token or value.strip().decode("latin-1")
        elif name == b"x-stainless-retry-count":
            retry = value != b"0"
        elif name == b"anthropic-version":
            anthropic = True
    return token, retry, anthropic


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
