"""The pods of a run, kept up to date: a list, then a watch from there, again and again."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aglite.rollouts.backends.kube.api import FIRST_WAIT_S, LONGEST_WAIT_S, Api, ApiError, Silence

log = logging.getLogger("aglite.rollouts")

WATCH_S = 240
"""The API server is asked to end a watch after so long; the next goes on where it ended."""

Object = dict[str, Any]


class Watch:
    """Follows the objects that a label selector chooses. Its callbacks run on the event loop:

    `on_object(object)` for each one that is new or has changed, `on_gone(object)` for each that was deleted, and
    `on_list(objects)` for all there are, whenever a history has to begin anew: at the start, and where the server no
    longer has the version that the watch knows (410). What was deleted in between is missing there.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        *,
        on_object: Callable[[Object], None],
        on_gone: Callable[[Object], None],
        on_list: Callable[[Sequence[Object]], None],
    ) -> None:
        self._api = api
        self._path = path
        self._selector = selector
        self._on_object = on_object
        self._on_gone = on_gone
        self._on_list = on_list
        self._version: str | None = None
        self._away = False

    async def start(self) -> None:
        """List once. Raises ApiError or BackendError."""
        await self._list()

    async def run(self) -> None:
        """Follow for ever, whatever happens to the server. Ends only by being cancelled."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                if self._version is None:
                    await self._list()
                async for event in self._events():
                    wait_s = FIRST_WAIT_S
                    if self._away:
                        self._away = False
                        log.info("Kubernetes answers again")
                    self._take(event)
            except _Expired:
                self._version = None
                continue
            except Silence:
                continue  # bookmarks come about once a minute, sooner or later
            except Exception as error:  # whatever breaks it, also a proxy's page, the mend is to connect again
                if not self._away:
                    self._away = True
                    log.warning("lost the connection to Kubernetes, connecting again: %s", error)
                if isinstance(error, ApiError):
                    self._version = None
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                # The server ended it: time was up, or it is being restarted.
                await asyncio.sleep(FIRST_WAIT_S * random.uniform(0.8, 1.2))

    async def _list(self) -> None:
        found = await self._api.call("GET", self._path, query=[("labelSelector", self._selector)])
        self._version = found["metadata"]["resourceVersion"]
        self._on_list(found["items"])

    async def _events(self) -> AsyncIterator[Object]:
        query = [
            ("labelSelector", self._selector),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCH_S)),
            ("resourceVersion", str(self._version)),
        ]
        try:
            async with self._api.stream(self._path, query) as chunks:
                rest = b""
                async for chunk in chunks:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
        except ApiError as error:
            if error.status == 410:
                raise _Expired from None
            raise

    def _take(self, event: Object) -> None:
        kind, what = event["type"], event["object"]
        if kind == "ERROR":
            if what.get("code") == 410:
                raise _Expired
            raise ApiError(what.get("code", 500), what.get("reason", ""), what.get("message", ""))
        self._version = what["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._on_gone(what)
        elif kind != "BOOKMARK":
            self._on_object(what)


class _Expired(Exception):
    """The server does not have the version any more that the watch would go on from."""
