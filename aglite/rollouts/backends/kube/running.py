"""An agent in its pod: how it ends, how it is ended, and what it leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from aglite.errors import RecipeError
from aglite.rollouts.backends import Launch
from aglite.rollouts.backends.contained import FOLDER, LOST_OUTPUT_END_S, OUTPUT_END_S, Contained
from aglite.rollouts.backends.kube import exec as execs
from aglite.rollouts.backends.kube.api import FIRST_WAIT_S, PATIENCE_S, Api, ApiError, NoAnswer
from aglite.rollouts.backends.kube.attempt import Attempt
from aglite.rollouts.backends.kube.logs import Follower
from aglite.rollouts.backends.kube.pods import AGENT, OUT
from aglite.rollouts.backends.local import remove_tree
from aglite.rollouts.backends.unpack import unpack_left
from aglite.rollouts.causes import BackendError, Cause
from aglite.rollouts.process import Exit

log = logging.getLogger("aglite.rollouts")

GONE_S = 60.0
"""How long it is waited for that a pod whose agent does not end is deleted."""

TERM = "kill -s TERM -- -1"
KILL = "while :; do kill -s KILL -- -1; sleep 0.1; done"
"""In the agent's container: end all its processes but the first one, which ends with the agent."""
ONLY_THERE = '[ "$(cat /proc/1/comm)" = sh ] || { echo "not a process namespace of its own" >&2; exit 126; }'
"""Before such a command: where a pod shares its processes, they are not all the agent's."""


class KubernetesRunning(Contained):
    """See Running. `discard` deletes all that is in the cluster, and its task is done when that is gone."""

    def __init__(
        self,
        api: Api,
        attempt: Attempt,
        output: Follower,
        scratch: Path,
        launch: Launch,
        discard: Callable[[Attempt], asyncio.Task[None]],
    ) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._folder = scratch / f"{launch.rollout_id}.{launch.attempt}"
        self.workdir = self._folder / "work"
        self.flags: list[str] = []
        self._discard = discard
        self._api = api
        self._attempt = attempt
        self._output = output
        self._limits = launch.limits
        self._stopped = False
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        output_end_s = OUTPUT_END_S
        try:
            exit = (await self._attempt.until("ended")).exit
            assert exit is not None
        except BackendError as error:
            exit, output_end_s = Exit(-9, 0.0, error.cause), LOST_OUTPUT_END_S
        except RecipeError as error:
            exit = Exit(127, 0.0, Cause("recipe", f"{error.message} ({error.mend})"))
        await self._output.finish(output_end_s)
        self.exited.set_result(exit)

    async def stop(self, grace_s: float = 0.0) -> list[str]:
        if self._stopped:
            return []
        self._stopped = True
        try:
            await self._end(grace_s)
            # The kernel ended whatever else ran in the container when its first process ended.
            await self._take_files(self.exited.result().cause)
        finally:
            self._following.cancel()
            self._output.close()
            self._discard(self._attempt)
        return []

    async def remove(self) -> None:
        await asyncio.to_thread(remove_tree, self._folder)

    async def _end(self, grace_s: float) -> None:
        if not self.exited.done() and grace_s > 0:
            await self._signal(TERM, grace_s)
        if not self.exited.done():
            await self._signal(KILL, PATIENCE_S)
        if not self.exited.done():
            await asyncio.wait({self._discard(self._attempt)}, timeout=GONE_S)
            raise BackendError(Cause("lost", f"pod {self._attempt.pod} does not end on SIGKILL"))

    async def _signal(self, script: str, timeout_s: float) -> None:
        """Run a script in the agent's container until the agent has ended, at most so long."""
        work = asyncio.create_task(self._run_in_agent(script))
        try:
            await asyncio.wait({self.exited}, timeout=timeout_s)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _take_files(self, cause: Cause | None) -> None:
        if cause is not None and cause.kind == "infrastructure":
            raise BackendError(cause)
        most = self._limits.disk_mb << 20
        if cause is not None and cause.code == "disk":  # its pod was evicted, and its files with it
            await asyncio.to_thread(self.workdir.mkdir, parents=True, exist_ok=True)
            self.flags.append("oversize")
            return
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                archive, too_much, special = await execs.take(self._api, self._attempt.pod, OUT, FOLDER, most)
                break
            except NoAnswer as error:
                if time.monotonic() > deadline:
                    raise BackendError(Cause("lost", f"what the agent left cannot be fetched: {error}")) from error
                await asyncio.sleep(5 * FIRST_WAIT_S)
            except (ApiError, execs.ExecError) as error:
                raise BackendError(Cause("lost", f"what the agent left cannot be fetched: {error}")) from error
        links, odd = await asyncio.to_thread(unpack_left, archive, self._folder, most_bytes=most)
        signs = {"symlinks": links, "special_files": special + odd, "oversize": too_much}
        self.flags += [flag for flag, count in signs.items() if count]

    async def _run_in_agent(self, script: str) -> None:
        while True:
            try:
                await execs.run(self._api, self._attempt.pod, AGENT, ["sh", "-c", f"{ONLY_THERE}; {script}"])
                return
            except (ApiError, NoAnswer, execs.ExecError) as error:
                log.debug("exec in %s: %s", self._attempt.pod, error)
            await asyncio.sleep(2 * FIRST_WAIT_S)
