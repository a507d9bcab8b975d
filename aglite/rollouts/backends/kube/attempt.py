"""One attempt's Job, as far as the watch has shown it."""

from __future__ import annotations

import asyncio
from typing import Any

from aglite.config import Limits
from aglite.errors import RecipeError
from aglite.rollouts.backends.kube.lease import Lease
from aglite.rollouts.backends.kube.pods import Seen, Stage, look
from aglite.rollouts.causes import BackendError, Cause

ORDER: tuple[Stage, ...] = ("pending", "files", "filled", "running", "ended")


class Attempt:
    """Told of its pod by whoever watches, and waited for by whoever runs it. It never goes back: once its agent has
    ended or is lost, nothing changes that."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        """Of its Job and its Secret."""
        self.pod = ""
        """Of its pod, once there is one."""
        self.is_there = False
        """Whether there is a pod now."""
        self.lease: Lease | None = None
        """Of its Job, once that is made."""
        self.waits_for = "its pod is to be made"
        """Why it does not run yet, for people."""
        self._limits = limits
        self._seen = Seen("pending")
        self._failure: BackendError | RecipeError | None = None
        self._changed = asyncio.Event()

    def update(self, pod: dict[str, Any]) -> None:
        """What its pod is like now."""
        name = pod["metadata"]["name"]
        if self.pod and name != self.pod:
            return  # a second pod of the Job: the first one's end is what counts, and the Job goes with it
        self.pod, self.is_there = name, True
        if self._failure is None and self._seen.stage != "ended":
            try:
                seen = look(pod, self._limits, self.lease.ended if self.lease else "")
            except (BackendError, RecipeError) as error:
                self._failure = error
            else:
                if ORDER.index(seen.stage) >= ORDER.index(self._seen.stage):
                    self._seen = seen
                self.waits_for = seen.waits_for or self.waits_for
        self._tell()

    def gone(self) -> None:
        """There is no pod of it any more."""
        self.is_there = False
        if self._failure is None and self._seen.stage != "ended":
            past = self.lease.ended if self.lease else ""
            self._failure = BackendError(Cause("lost", past or "its pod was deleted"))
        self._tell()

    async def until(self, stage: Stage) -> Seen:
        """Wait until it is that far or farther. Raises BackendError or RecipeError when it will not be."""
        while not self.is_past(stage):
            self.check()
            self._changed.clear()
            await self._changed.wait()
        return self._seen

    def is_past(self, stage: Stage) -> bool:
        return ORDER.index(self._seen.stage) >= ORDER.index(stage)

    def check(self) -> None:
        """Raise what it failed by."""
        if self._failure is not None:
            raise self._failure

    async def until_gone(self) -> None:
        """Wait until there is no pod."""
        while self.is_there:
            self._changed.clear()
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
