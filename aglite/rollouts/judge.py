"""A judge model for graders: an address of their own that passes requests on, with the key, and records them.

A grader is given `JUDGE_BASE_URL`, `JUDGE_API_KEY` and `JUDGE_MODEL`; any client of Chat Completions works with them.
The key in there is a token that is good for this grading alone; the endpoint's own stays in this process.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from aglite.config.reward import Judge as Settings
from aglite.errors import RecipeError
from aglite.net import Listener, bind

if TYPE_CHECKING:
    from aglite.store import Store

SILENCE_S = 300.0
BODY_BYTES = 8 << 20


def check_key(settings: Settings) -> None:
    """Raises RecipeError if there is no key where the recipe says."""
    name = settings.key_env
    if name and not os.environ.get(name, "").strip():
        raise RecipeError(f"reward.judge.key_env: the environment has no {name}", f"export {name}=... and start again")


@dataclass(slots=True)
class _Grading:
    rollout_id: str
    attempt: int
    calls: int = 0


class Judge:
    """Passes on what graders ask, as long as their grading lasts."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._url = f"{settings.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._gradings: dict[str, _Grading] = {}
        self._session: aiohttp.ClientSession | None = None
        self._listener: Listener | None = None

    async def start(self) -> None:
        check_key(self._settings)
        key = os.environ.get(self._settings.key_env, "").strip() if self._settings.key_env else ""
        self._session = aiohttp.ClientSession(
            headers={"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S),
            trust_env=True,
        )
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        self._listener = Listener(app, bind("127.0.0.1", 0, "the judge's address", "reward.judge"))
        await self._listener.start()

    async def stop(self) -> None:
        if self._listener is not None:
            await self._listener.stop()
        if self._session is not None:
            await self._session.close()

    def open(self, rollout_id: str, attempt: int) -> dict[str, str]:
        """Environment for the grader of one attempt; `close` it by its JUDGE_API_KEY."""
        assert self._listener is not None
        token = secrets.token_urlsafe(24)
        self._gradings[token] = _Grading(rollout_id, attempt)
        return {
            "JUDGE_BASE_URL": f"{self._listener.url}/v1",
            "JUDGE_API_KEY": token,
            "JUDGE_MODEL": self._settings.model,
        }

    def close(self, env: dict[str, str]) -> None:
        self._gradings.pop(env["JUDGE_API_KEY"], None)

    async def _answer(self, request: Request) -> JSONResponse:
        grading = self._gradings.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if grading is None:
            return _error(401, "this address answers graders while they grade")
        if grading.calls >= self._settings.calls:
            return _error(403, f"a grading may make {self._settings.calls} calls (reward.judge.calls)")
        grading.calls += 1
        data = await _body(request)
        if data is None:
            return _error(413, f"the request is longer than {BODY_BYTES:,} bytes")
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict) or body.get("stream"):
            return _error(400, "send a JSON object without `stream`: judges answer in one piece")
        body["model"] = self._settings.model
        began = time.time()
        status, reply = await self._ask(body)
        await self._store.add_judge_call(
            grading.rollout_id, grading.attempt, self._settings.model, status, body, reply, began, time.time()
        )
        return JSONResponse(reply, status_code=status or 502)

    async def _ask(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The endpoint's status and answer; 0 and an error in its form if it gives none."""
        assert self._session is not None
        try:
            async with self._session.post(self._url, data=orjson.dumps(body)) as response:
                data, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, {"error": {"message": f"{self._url} cannot be reached: {error or type(error).__name__}"}}
        try:
            reply = orjson.loads(data)
        except orjson.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            return status if status >= 400 else 0, {"error": {"message": data[:500].decode(errors="replace")}}
        return status, reply


async def _body(request: Request) -> bytes | None:
    """The body of a request; None if it is longer than BODY_BYTES, whatever was said of its length before."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            return None
    return bytes(data)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)
