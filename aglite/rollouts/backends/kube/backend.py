"""Agents as Jobs of a Kubernetes cluster, one an attempt.

A pod has three containers. `files-in` waits until the agent's files have been sent to it; then `agent` runs, from the
recipe's image, with the gateway as all that it can reach; `files-out` stays until what the agent left has been fetched.
Files go through the API server (`exec`), the agent's keys through a Secret. A watch tells what happens to the pods.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from aglite.config import Recipe
from aglite.paths import RunDir
from aglite.rollouts.backends import Launch
from aglite.rollouts.backends.kube import begin, lease
from aglite.rollouts.backends.kube.api import Api, ApiError, refused
from aglite.rollouts.backends.kube.attempt import Attempt
from aglite.rollouts.backends.kube.check import check_cluster
from aglite.rollouts.backends.kube.logs import Follower
from aglite.rollouts.backends.kube.manifests import (
    LABEL_ATTEMPT,
    LABEL_ROLLOUT,
    LABEL_SUPERVISOR,
    Run,
    Templates,
    gateway_of,
    packed,
    secret_of,
)
from aglite.rollouts.backends.kube.objects import Objects, run_id
from aglite.rollouts.backends.kube.pods import AGENT
from aglite.rollouts.backends.kube.running import KubernetesRunning
from aglite.rollouts.backends.kube.try_out import try_out
from aglite.rollouts.backends.kube.watch import Watch
from aglite.rollouts.backends.local import remove_attempts
from aglite.rollouts.causes import BackendError, Cause
from aglite.rollouts.logfile import LogFile

log = logging.getLogger("aglite.rollouts")

CLOSE_S = 60.0
"""How long the end of a run waits until everything is seen deleted."""


class KubernetesBackend:
    name = "kubernetes"
    starts_slowly = True

    def __init__(self, run_dir: RunDir, recipe: Recipe, programs: Mapping[str, str]) -> None:
        """`programs`: what is started in containers, by the setting that names it."""
        assert recipe.gateway.public_url is not None
        self.base_url = recipe.gateway.public_url
        self._recipe = recipe
        self._settings = recipe.agent.kubernetes
        self._programs = programs
        self._run_dir = run_dir
        self._scratch = run_dir.scratch.resolve()
        self._api: Api | None = None
        self._run: Run
        self._objects: Objects | None = None
        self._templates: Templates
        self._watching: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._attempts: dict[str, Attempt] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> Mapping[str, Any]:
        self._templates = Templates(self._recipe)
        gateway = await asyncio.to_thread(gateway_of, self.base_url)
        api = self._api = await Api.connect(self._settings)
        version = await check_cluster(api, self._recipe.agent.network == "sealed")
        self._run = Run(run_id(self._run_dir), secrets.token_hex(8), api.namespace, gateway)
        self._objects = Objects(api, self._run)
        await self.sweep()
        if self._recipe.agent.network == "sealed":
            await self._objects.apply(self._objects.policies, self._templates.policy(self._run))
        watch = Watch(
            api,
            self._objects.pods,
            self._objects.selector,
            on_object=self._on_pod,
            on_gone=self._on_gone,
            on_list=self._on_list,
        )
        try:
            await watch.start()
        except ApiError as error:
            raise refused(error, "its pods to be listed") from error
        self._watching = asyncio.create_task(watch.run())
        self._renewing = asyncio.create_task(self._renew())
        await try_out(self, self._recipe.agent, self._programs, self._run_dir)
        return {
            "kubernetes": version,
            "context": api.context,
            "cluster": api.host,
            "namespace": api.namespace,
            "image": self._recipe.agent.image,
        }

    async def close(self) -> None:
        if self._api is None:
            return
        try:
            if self._removing:
                await asyncio.wait(set(self._removing.values()), timeout=CLOSE_S)
            if self._removing:
                names = ", ".join(sorted(self._removing))
                log.warning("Jobs of this run may be left for some minutes: %s", names)
            if self._watching is not None and self._recipe.agent.network == "sealed":
                assert self._objects is not None
                await self._objects.delete(f"{self._objects.policies}/{self._run.policy}")
        except (ApiError, BackendError) as error:
            log.warning("the NetworkPolicy of this run may be left: %s", error)
        finally:
            tasks = [*self._removing.values(), *filter(None, (self._watching, self._renewing))]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            api, self._api, self._objects = self._api, None, None
            await api.close()

    async def start(self, launch: Launch) -> KubernetesRunning:
        assert self._api is not None
        job, secret = self._templates.job(launch, self._run), secret_of(launch, self._run)
        archive, size = await asyncio.to_thread(packed, launch, self._templates.ca)
        attempt = Attempt(job["metadata"]["name"], launch.limits)
        output = None
        with archive:
            try:
                async with asyncio.timeout(self._settings.start_timeout_s):
                    await self._settled(attempt)
                    self._attempts[attempt.name] = attempt
                    await begin.make(self._objects, attempt, job, secret, self._settings.deadline_s)
                    await begin.reach(self._objects, attempt)
                    await begin.fill(self._api, attempt, archive, size)
                    await attempt.until("running")
                launch.log.parent.mkdir(parents=True, exist_ok=True)
                output = LogFile(launch.log, launch.limits.log_bytes, redactor=launch.redactor)
                follower = Follower(self._api, attempt.pod, AGENT, output)
            except BaseException as error:
                self.discard(attempt)
                if isinstance(error, TimeoutError):
                    text = f"not started within {self._settings.start_timeout_s:g} s: {attempt.waits_for}"
                    raise BackendError(Cause("backend", text)) from None
                raise
        return KubernetesRunning(self._api, attempt, follower, self._scratch, launch, self.discard)

    async def sweep(self) -> list[str]:
        if self._objects is None:
            return []
        try:
            found = [*await self._objects.list(self._objects.jobs), *await self._objects.list(self._objects.secrets)]
        except (ApiError, BackendError) as error:
            log.warning("Jobs of this run may be left for some minutes: %s", error)
            found = []
        names = {one["metadata"]["name"] for one in found} - self._removing.keys()
        for name in names:
            self.discard(self._attempts.get(name) or Attempt(name, self._recipe.agent.limits))
        if self._removing:
            await asyncio.wait(set(self._removing.values()), timeout=CLOSE_S)
        await asyncio.to_thread(remove_attempts, self._scratch)
        return sorted(names)

    def discard(self, attempt: Attempt) -> asyncio.Task[None]:
        """Delete all of an attempt that is in the cluster, in the background. The task is done when it is gone."""
        name = attempt.name
        if name not in self._removing:
            task = self._removing[name] = asyncio.create_task(self._objects.remove(attempt), name=f"delete {name}")
            task.add_done_callback(lambda _: (self._removing.pop(name, None), self._attempts.pop(name, None)))
        return self._removing[name]

    async def _settled(self, attempt: Attempt) -> None:
        """Wait until an earlier attempt of the same name is gone."""
        if attempt.name in self._removing:
            attempt.waits_for = "its Job of before is being deleted"
            await asyncio.wait({self._removing[attempt.name]})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(lease.RENEW_S)
            lasting = [one for name, one in self._attempts.items() if one.lease and name not in self._removing]
            await asyncio.gather(*(self._objects.renew(attempt) for attempt in lasting))

    # what the watch tells

    def _name(self, pod: Mapping[str, Any]) -> str:
        labels = pod["metadata"].get("labels") or {}
        return self._run.name(labels.get(LABEL_ROLLOUT, ""), int(labels.get(LABEL_ATTEMPT, 0)))

    def _on_pod(self, pod: dict[str, Any]) -> None:
        attempt = self._attempts.get(self._name(pod))
        if attempt is not None:
            attempt.update(pod)
        elif (pod["metadata"].get("labels") or {}).get(LABEL_SUPERVISOR) == self._run.supervisor:
            self.discard(Attempt(self._name(pod), self._recipe.agent.limits))  # nobody waits for it any more

    def _on_gone(self, pod: dict[str, Any]) -> None:
        attempt = self._attempts.get(self._name(pod))
        if attempt is not None and attempt.pod == pod["metadata"]["name"]:
            attempt.gone()

    def _on_list(self, pods: Sequence[dict[str, Any]]) -> None:
        there = {pod["metadata"]["name"] for pod in pods}
        for attempt in list(self._attempts.values()):
            if attempt.is_there and attempt.pod not in there:
                attempt.gone()
        for pod in pods:
            self._on_pod(pod)
