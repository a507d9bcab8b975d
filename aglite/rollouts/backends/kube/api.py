"""What is said to a Kubernetes API server, over the official client: requests with patience, streams, errors.

The client (`kubernetes.aio`) brings configuration, credentials and TLS. Objects travel as plain JSON: its typed methods
would know only the fields of their own version, and templates are the user's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import yaml

from aglite.config import Kubernetes
from aglite.errors import AgliteError, RecipeError
from aglite.rollouts.causes import BackendError, Cause

if TYPE_CHECKING:
    import aiohttp
    from kubernetes.aio.client import ApiClient

CALL_TIMEOUT_S = 30.0
PATIENCE_S = 60.0
"""How long a request is tried while the API server does not answer or asks to come back later."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
PASSING = (429, 500, 502, 503, 504)
"""HTTP statuses that are worth another try of the same request."""
RECONNECT_S = 10.0
"""Credentials are read anew at most this often."""
SILENCE_S = 60.0
"""A stream without a byte for so long is opened anew: its other end may be gone without a word."""
HEARTBEAT_S = 30.0
"""Between signs of life that the other end of an `exec` is asked for."""

INSTALL = "pip install 'aglite[kubernetes]'"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

AUTH = ("BearerToken",)

Query = Sequence[tuple[str, str]]


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        """Kubernetes's own word for it, such as AlreadyExists."""
        self.retry_after_s = retry_after_s

    @property
    def is_quota(self) -> bool:
        """Whether the namespace is full, which passes."""
        return self.status == 403 and "exceeded quota" in str(self)


class Api:
    """One namespace of one cluster. Made by `connect`."""

    def __init__(self, settings: Kubernetes) -> None:
        self._settings = settings
        self._client: ApiClient
        self._former: list[ApiClient] = []
        self._connected_at = 0.0
        self.context: str | None = None
        """Of the kubeconfig; None where aglite runs in the cluster itself."""
        self.namespace = ""
        self.host = ""

    @classmethod
    async def connect(cls, settings: Kubernetes) -> Api:
        """Read the configuration, and say nothing to the server yet. Raises RecipeError where there is none."""
        api = cls(settings)
        try:
            api._client = await api._load()
        except ImportError:
            raise RecipeError("agent.backend: the Kubernetes client is not installed", INSTALL) from None
        return api

    async def close(self) -> None:
        for client in (*self._former, self._client):
            await client.close()

    async def _load(self) -> ApiClient:
        from kubernetes.aio import config
        from kubernetes.aio.client import ApiClient, Configuration

        configuration = Configuration()
        settings, files = self._settings, kubeconfig_files()
        found = ""
        try:
            if any(file.is_file() for file in files):
                loader = await config.load_kube_config(
                    os.pathsep.join(map(str, files)), settings.context, configuration, persist_config=False
                )
                self.context = loader.current_context["name"]
                found = loader.current_context["context"].get("namespace", "")
            else:
                config.load_incluster_config(configuration)
                found = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else ""
        except (config.ConfigException, yaml.YAMLError, OSError, ValueError) as error:
            where = ", ".join(map(str, files))
            raise RecipeError(
                f"agent.backend: no cluster is configured: {error}",
                f"put a kubeconfig at {where} (or name it in KUBECONFIG), and see `kubectl config get-contexts`",
            ) from None
        configuration.retries = None  # `call` has its own patience
        self.namespace = settings.namespace or found or "default"
        self.host = str(configuration.host)
        self._connected_at = time.monotonic()
        return ApiClient(configuration)

    async def _has_newer(self, client: ApiClient) -> bool:
        """Whether there are other credentials now than a client's, which were refused. Tokens of cloud providers hold
        for minutes: the configuration is read anew. Raises NoAnswer where that cannot be done at the moment."""
        if self._client is client and time.monotonic() - self._connected_at > RECONNECT_S:
            try:
                newer = await self._load()
            except RecipeError as error:  # it was there at the start: somebody is writing it
                raise NoAnswer(error.message) from error
            self._former.append(self._client)  # streams may still come over it
            self._client = newer
        return self._client is not client

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Query = (),
        *,
        patience_s: float = PATIENCE_S,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request; the object that it is answered with. Raises ApiError, or BackendError without an answer.

        What may pass is tried again for `patience_s`. So a request may arrive twice: a name that exists already may be
        the caller's own.
        """
        deadline = time.monotonic() + patience_s
        wait_s = FIRST_WAIT_S
        while True:
            problem: Exception
            try:
                async with self._request(
                    method, path, body, query, timeout_s=CALL_TIMEOUT_S, content_type=content_type
                ) as answer:
                    data = await answer.read()
                return _parsed(data)
            except ApiError as error:
                if error.status not in PASSING:
                    raise
                problem = error
                wait_s = max(wait_s, error.retry_after_s or 0.0)
            except NoAnswer as error:
                problem = error
            wait_s *= random.uniform(0.8, 1.2)
            if time.monotonic() + wait_s > deadline:
                raise BackendError(Cause("backend", f"Kubernetes: {str(problem)[:300]}")) from problem
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of an answer as they come. Raises ApiError, or NoAnswer (also from the iterator, when it breaks or
        is silent)."""
        async with self._request("GET", path, None, query, timeout_s=None) as answer:
            yield _chunks(answer)

    @asynccontextmanager
    async def websocket(self, path: str, query: Query) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A connection for `exec`. Raises ApiError or NoAnswer."""
        import aiohttp
        from kubernetes.aio.stream.ws_client import get_websocket_url

        client = self._client
        _, url, headers, _, _ = await client.param_serialize("GET", path, header_params={}, auth_settings=AUTH)
        rest = client.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()
        try:
            async with rest.pool_manager.ws_connect(
                f"{get_websocket_url(url)}?{urlencode(query)}",
                headers=headers,
                protocols=("v4.channel.k8s.io",),
                heartbeat=HEARTBEAT_S,
                max_msg_size=0,
                server_hostname=rest.configuration.tls_server_name or None,
                proxy=rest.proxy,
                proxy_headers=rest.proxy_headers,
            ) as connection:
                yield connection
        except aiohttp.WSServerHandshakeError as error:
            if error.status in PASSING or (error.status == 401 and await self._has_newer(client)):
                raise NoAnswer(f"exec: HTTP {error.status}") from error
            raise ApiError(error.status, "", f"exec: {error.message or f'HTTP {error.status}'}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(_text(error)) from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Query,
        *,
        timeout_s: float | None,
        content_type: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        client = self._client
        header_params = {"Accept": "application/json, */*", "Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CALL_TIMEOUT_S, sock_read=SILENCE_S)
        try:
            method, url, headers, payload, _ = await client.param_serialize(
                method,
                path,
                query_params=list(query),
                header_params=header_params,
                body=body,
                auth_settings=AUTH,
            )
            answer = (await client.call_api(method, url, headers, payload, _request_timeout=timeout)).response
            try:
                if answer.status == 401 and await self._has_newer(client):
                    raise NoAnswer("its credentials have expired, and were read anew")
                if answer.status >= 400:
                    raise _refusal(answer.status, await answer.read(), answer.headers.get("Retry-After"))
                yield answer
            finally:
                answer.close() if timeout_s is None else answer.release()
        except aiohttp.SocketTimeoutError as error:
            raise Silence(f"nothing was heard for {SILENCE_S:g} s") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(_text(error)) from error


class NoAnswer(Exception):
    """The API server cannot be reached, or broke off."""


def _parsed(data: bytes) -> dict[str, Any]:
    """An answer as an object. Raises NoAnswer for what is none, such as a page of a proxy in between."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NoAnswer(f"what answers is no API server: {data[:100]!r}")
    return found


class Silence(NoAnswer):
    """It says nothing, which may be all that there is to say."""


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.content.iter_any():
        yield chunk


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _refusal(status: int, data: bytes, retry_after: str | None) -> ApiError:
    reason, message = "", data.decode("utf-8", "replace")[:500]
    try:
        said = json.loads(data)
        reason, message = said.get("reason") or "", said.get("message") or message
    except (ValueError, AttributeError):
        pass
    return ApiError(status, reason, message, float(retry_after) if retry_after and retry_after.isdigit() else None)


def kubeconfig_files() -> list[Path]:
    """Where the configuration of a cluster is looked for, as kubectl does."""
    named = os.environ.get("KUBECONFIG")
    if named:
        return [Path(name) for name in named.split(os.pathsep) if name]
    return [Path.home() / ".kube" / "config"]


def refused(error: ApiError, what: str) -> AgliteError | BackendError:
    """What a refusal means: RecipeError where only the user can mend it, BackendError otherwise."""
    text = str(error)[:400]
    if error.status in (401, 403) and not error.is_quota:
        return RecipeError(
            f"agent.backend: the cluster does not allow {what}: {text}",
            "grant what docs/sandboxes.md lists, or choose another agent.kubernetes.namespace or context",
        )
    if error.status in (400, 422):
        return RecipeError(
            f"agent.kubernetes: the cluster does not take {what}: {text}", "correct the template or setting"
        )
    if error.status == 404:
        return RecipeError(f"agent.kubernetes: {what}: {text}", "see that agent.kubernetes.namespace exists")
    return BackendError(Cause("backend", f"Kubernetes: {what}: {text}"))
