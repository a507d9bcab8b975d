"""A server that answers over HTTP: requests to it, its streams as they arrive, its errors in its own words."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from time import monotonic
from typing import Any

import aiohttp
import orjson
from yarl import URL

from aglite.engine.base import EngineBusy, EngineStats, RequestRefused
from aglite.errors import AgliteError, EngineError

SILENCE_S = 600.0
"""Without a byte for so long, the server counts as gone. One that queues requests may be silent for minutes."""

IDLE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn, and so vLLM, closes it."""


class Unreachable(EngineError):
    """The server could not be reached, or broke off before it had answered."""


class Upstream:
    """An HTTP server by its address, which may end in `/v1`; as many connections as there are requests.

    `what` names it in errors; `proxied` reaches it through the proxy that the environment names. `lost` is set when it
    could not be reached or broke off, for whoever looks after it. With `socket`, the path of a Unix socket, it is a
    child of ours: `url` is only a name then, and it may be silent for as long as it lives.
    """

    def __init__(
        self, url: str, what: str, key_env: str = "", *, proxied: bool = False, socket: str = "", log: str = ""
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.where = what if socket else f"{what} at {self.url}"
        self.lost = False
        self._what = what
        self._key_env = key_env
        self._proxied = proxied
        self._socket = socket
        self._mend = f"see {log}" if log else "see that it runs, and check engine.url"
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",  # a compressed stream would wait for its blocks to fill
            **_authorization(key_env),
        }
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Any:
        """A JSON document. Raises EngineError."""
        data = await self.get_text(path)
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            raise EngineError(f"{self._what}: GET {path} gave no JSON", "check engine.url") from None

    async def get_text(self, path: str) -> bytes:
        """What stands there. Raises EngineError."""
        try:
            async with self._open().get(f"{self.url}{path}") as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.gone(error) from None
        if response.status != 200:
            raise self.refusal(response, data)
        return data

    async def post(self, path: str, body: bytes) -> bytes:
        """POST `body`; the whole body that comes back. Raises EngineError. Cancelling closes the connection."""
        try:
            async with await self.send(path, body) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.gone(error) from None
        if response.status != 200:
            raise self.refusal(response, data)
        return data

    def events(self, path: str, body: bytes, mark: int = 0) -> Events:
        """POST `body` and read the events that come back: `async with` and `async for`."""
        return Events(self, path, body, mark)

    async def send(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        """POST `body`; the answer, of which only the head has been read."""
        url = self._urls.get(path)
        if url is None:  # parsed once
            url = self._urls[path] = URL(f"{self.url}{path}")
        try:
            return await self._open().post(url, data=body)
        except (
            aiohttp.ServerDisconnectedError,
            aiohttp.ClientOSError,
        ):  # it closed an idle connection just when we took it
            return await self._open().post(url, data=body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=IDLE_S)
                if self._socket
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            )
            silence = None if self._socket else SILENCE_S
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=self._proxied,  # reads the environment and .netrc anew for each request, in a thread
            )
        return self._session

    def gone(self, error: Exception) -> Unreachable:
        self.lost = True
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = f"cannot be reached ({error.os_error.strerror or error.os_error})"
        elif isinstance(error, TimeoutError):
            reason = "gave no sign of life in time"
        else:
            reason = f"broke off the connection ({str(error) or type(error).__name__})"
        return Unreachable(f"{self.where} {reason}", self._mend)

    def refusal(self, response: aiohttp.ClientResponse, data: bytes) -> EngineError:
        words, code, param = error_words(data)
        said = f"{self._what}: {words or response.reason or ''}".rstrip(": ")
        status = response.status
        if status == 429 or status >= 500:
            return EngineBusy(f"{said} (HTTP {status})", retry_after_s=_seconds(response.headers.get("retry-after")))
        if status in (401, 402, 403):
            held = f"the key in ${self._key_env}" if self._key_env else "no key (engine.key_env is not set)"
            return EngineError(
                f"{said} (HTTP {status}, with {held})", "set engine.key_env to the variable with the key"
            )
        if status in (404, 405):
            return EngineError(f"{said} (HTTP {status})", "check engine.url and engine.model")
        return RequestRefused(said, code=code, param=param)


class Events:
    """The events of one response: the data of those that arrived together, list after list.

    Leaving its `async with` before the end closes the connection, which ends the server's work on it. `mark` is what
    `note` had last said when the latest list arrived, however much later it is asked for.
    """

    def __init__(self, server: Upstream, path: str, body: bytes, mark: int) -> None:
        self.mark = mark
        self._server = server
        self._path = path
        self._body = body
        self._now = mark
        self._rest = b""
        self._early: deque[tuple[list[bytes], int]] = deque()
        self._reading = False
        self._response: aiohttp.ClientResponse | None = None

    @property
    def waits(self) -> bool:
        """Whether the server is to send something: not while whoever reads along deals with what came last."""
        return self._response is None or self._reading

    async def __aenter__(self) -> Events:
        """Send the request. Raises EngineError."""
        try:
            response = await self._server.send(self._path, self._body)
            if response.status != 200:
                with contextlib.closing(response):
                    raise self._server.refusal(response, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._server.gone(error) from None
        self._response = response
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._response is not None
        self._response.close()  # after the end of the body the connection has been given back already

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> list[bytes]:
        if self._early:
            found, self.mark = self._early.popleft()
            return found
        assert self._response is not None
        try:
            while True:
                self._reading = True
                data = await self._response.content.readany()
                self._reading = False
                if not data:
                    raise StopAsyncIteration
                if found := self._split(data):
                    self.mark = self._now
                    return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._server.gone(error) from None

    def _split(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    async def note(self, mark: int) -> None:
        """What arrives from now on is marked with `mark`; what has arrived is not, though nobody has asked for it yet.

        To be called while the server sends nothing: what waits in the kernel is taken in first.
        """
        while not self._reading and (data := self._arrived()):
            if found := self._split(data):
                self._early.append((found, self._now))
            await asyncio.sleep(0.01)  # there may be more, which is received only now that there is room for it
        self._now = mark

    def _arrived(self) -> bytes:
        try:
            return self._response.content.read_nowait() if self._response is not None else b""
        except (aiohttp.ClientError, TimeoutError, OSError):  # the connection broke: whoever reads on is told
            return b""


def error_words(data: bytes) -> tuple[str, str | None, str | None]:
    """Message, code and parameter of an error's body, whatever there is of them."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data[:500].decode(errors="replace").strip(), None, None
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error)[:500], None, None
    words = error.get("message") or error.get("detail") or str(error)[:500]
    code, param = error.get("code"), error.get("param")
    return str(words), code if isinstance(code, str) else None, param if isinstance(param, str) else None


def _authorization(key_env: str) -> dict[str, str]:
    if not key_env:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise AgliteError(f"engine.key_env: the environment has no {key_env}", f"export {key_env}=... and start again")
    return {"authorization": f"Bearer {key}"}


def _seconds(retry_after: str | None) -> int:
    """Retry-After as seconds; a few when it is missing or a date."""
    try:
        return max(1, round(float(retry_after or "")))
    except ValueError:
        return 5


class Counter:
    """Requests in flight, and tokens as they are sampled."""

    def __init__(self) -> None:
        self.running = 0
        self.sampled = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=5)

    def stats(self) -> EngineStats:
        """The rate is that since the fifth last time this was asked."""
        self._seen.append((monotonic(), self.sampled))
        (since, before), (now, sampled) = self._seen[0], self._seen[-1]
        rate = (sampled - before) / (now - since) if now > since else 0.0
        return EngineStats(running=self.running, tokens_per_s=rate, sampled_tokens=sampled)
