"""The model routes as a plain ASGI application: a request is routed and read here, all else is the gateway's.

No framework on this path: validation models and dependency graphs cost more than the whole of the work per call.
"""

from __future__ import annotations

from typing import Any

import orjson

from aglite.gateway.connection import Connection, Receive, Send
from aglite.gateway.dialects.base import Dialect, Problem
from aglite.gateway.dialects.chat import ChatDialect
from aglite.gateway.dialects.completions import CompletionsDialect
from aglite.gateway.gateway import Gateway

_PREFIX = "/rollouts/"


class ModelApp:
    """Routes under `/rollouts/<id>/v1/` and, as the token names the rollout too, under `/v1/`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        chat = ChatDialect()
        self._dialects: dict[str, Dialect] = {"/chat/completions": chat, "/completions": CompletionsDialect()}
        self._default = chat

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        method = scope["method"]
        connection = Connection(receive, send)
        if method == "HEAD":  # some clients ask for the base URL to see whether anybody is there
            await connection.respond(200, b"")
            return
        rollout_id, route = split_path(scope["path"])
        dialect = self._dialects.get(route)
        problem: Problem | None = None
        if dialect is None and route != "/models" and not route.startswith("/models/"):
            problem = Problem(404, "not_found", f"there is no route {scope['path']}", code="not_found")
        elif method != ("GET" if dialect is None else "POST"):
            problem = Problem(405, "method", f"{scope['path']} does not take {method}", code="method_not_allowed")
        else:
            token, retry = _headers(scope["headers"])
            session = await self._gateway.authenticate(token, rollout_id)
            if isinstance(session, Problem):
                problem = session
            elif dialect is None:
                await connection.respond(200, self._models(route))
                return
            else:
                limit = session.limits.request_bytes
                try:
                    body = await connection.read_body(limit)
                except ConnectionResetError:
                    return
                if body is not None:
                    await self._gateway.handle(session, dialect, body, connection, retry=retry)
                    return
                problem = Problem(413, "too_large", f"the request body is longer than {limit} bytes", param="body")
        headers = problem.headers
        if problem.kind == "too_large":  # the rest of the body may not have been read
            headers = [*headers, (b"connection", b"close")]
        await connection.respond(problem.status, (dialect or self._default).error(problem), headers)

    def _models(self, route: str) -> bytes:
        models = self._gateway.models()
        return orjson.dumps(models if route == "/models" else models["data"][0])


def create_model_app(gateway: Gateway) -> ModelApp:
    """The ASGI application for agents: model routes only."""
    return ModelApp(gateway)


def split_path(path: str) -> tuple[str | None, str]:
    """The rollout named in a path and the route after it, without `/v1`: some clients' base URL leaves that out."""
    rollout_id = None
    if path.startswith(_PREFIX):
        rollout_id, _, rest = path[len(_PREFIX) :].partition("/")
        path = f"/{rest}"
    return rollout_id, path.removeprefix("/v1").rstrip("/") or "/"


def _headers(headers: list[tuple[bytes, bytes]]) -> tuple[str | None, bool]:
    """Token, and whether the client says that it is trying again."""
    token, retry = None, False
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                token = rest.strip().decode("latin-1")
        elif name == b"x-api-key":
            token = token or value.decode("latin-1")
        elif name == b"x-stainless-retry-count":
            retry = value != b"0"
    return token, retry


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
