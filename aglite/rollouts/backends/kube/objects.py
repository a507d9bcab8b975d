"""Making and deleting the objects of a run, so that nothing is made twice and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from aglite.paths import RunDir, write_private
from aglite.rollouts.backends.kube.api import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    Api,
    ApiError,
    Query,
    refused,
)
from aglite.rollouts.backends.kube.attempt import Attempt
from aglite.rollouts.backends.kube.manifests import LABEL_SUPERVISOR, Run
from aglite.rollouts.causes import BackendError

log = logging.getLogger("aglite.rollouts")

GONE_S = 30.0
"""After so long a pod that should end is deleted by force: its node may be gone, and nobody else would say so."""

MERGE = "application/merge-patch+json"
STRICT: Query = [("fieldValidation", "Strict")]
"""A field that the cluster does not know is a mistake of the template, not to be passed over."""


class Objects:
    """The Jobs, Secrets and the NetworkPolicy of one run in one namespace."""

    def __init__(self, api: Api, run: Run) -> None:
        self._api = api
        self._run = run
        self.jobs = f"/apis/batch/v1/namespaces/{api.namespace}/jobs"
        self.secrets = f"/api/v1/namespaces/{api.namespace}/secrets"
        self.pods = f"/api/v1/namespaces/{api.namespace}/pods"
        self.events = f"/api/v1/namespaces/{api.namespace}/events"
        self.policies = f"/apis/networking.k8s.io/v1/namespaces/{api.namespace}/networkpolicies"
        self.selector = ",".join(f"{name}={value}" for name, value in run.selector.items())

    async def make(self, path: str, body: Mapping[str, Any], waits: Callable[[str], None]) -> dict[str, Any]:
        """Create an object, as soon as its quota has room; `waits` is told why it is not there yet.

        Raises RecipeError or BackendError.
        """
        wait_s = FIRST_WAIT_S
        while True:
            try:
                if made := await self._try_to_make(path, body, waits):
                    return made
            except ApiError as error:
                raise refused(error, f"a {body['kind']}") from error
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _try_to_make(
        self, path: str, body: Mapping[str, Any], waits: Callable[[str], None]
    ) -> dict[str, Any] | None:
        """The object that was created, or None where it may be later. Raises ApiError or BackendError."""
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            return await self._api.call("POST", path, body, STRICT)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                there = await self.get(f"{path}/{name}")
                if there is not None and self._is_ours(there):
                    return there  # the answer to an earlier try got lost
                waits(f"a {kind} {name} of before is being deleted")
                await self.delete(f"{path}/{name}")
            elif error.status == 409 or error.is_quota:
                waits(str(error)[:300])
            else:
                raise
        return None

    def _is_ours(self, there: Mapping[str, Any]) -> bool:
        metadata = there["metadata"]
        labels = metadata.get("labels") or {}
        return labels.get(LABEL_SUPERVISOR) == self._run.supervisor and not metadata.get("deletionTimestamp")

    async def renew(self, attempt: Attempt) -> None:
        """Let an attempt's Job last for some more minutes. What fails is tried again by the next renewal."""
        lease = attempt.lease
        assert lease is not None
        wanted = lease.renewed_s
        if wanted == lease.lasts_s:
            return
        patch = {"spec": {"activeDeadlineSeconds": wanted}}
        try:
            await self._api.call("PATCH", f"{self.jobs}/{attempt.name}", patch, content_type=MERGE)
        except (ApiError, BackendError) as error:
            if not (isinstance(error, ApiError) and error.status == 404):
                log.warning("Job %s could not be renewed, and ends in some minutes: %s", attempt.name, error)
        else:
            lease.lasts_s = wanted

    async def apply(self, path: str, body: Mapping[str, Any]) -> None:
        """Make an object, or make the one of its name like it. Raises RecipeError or BackendError."""
        place = f"{path}/{body['metadata']['name']}"
        try:
            if await self.get(place) is None:
                await self._api.call("POST", path, body, STRICT)
            else:
                await self._api.call("PATCH", place, body, STRICT, content_type=MERGE)
        except ApiError as error:
            raise refused(error, f"a {body['kind']}") from error

    async def get(self, place: str) -> dict[str, Any] | None:
        """An object; None if there is none. Raises ApiError or BackendError."""
        try:
            return await self._api.call("GET", place)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, path: str, label: str = "") -> list[dict[str, Any]]:
        """The run's objects, of all its supervisors; with a label, where one is given."""
        selector = ",".join(filter(None, (self.selector, label)))
        return (await self._api.call("GET", path, query=[("labelSelector", selector)]))["items"]

    async def delete(self, place: str, **options: Any) -> None:
        """Ask for an object to be deleted, after all that belongs to it; one that is not there is fine."""
        options = {"propagationPolicy": "Foreground", **options}
        try:
            await self._api.call("DELETE", place, {"apiVersion": "v1", "kind": "DeleteOptions", **options})
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def remove(self, attempt: Attempt) -> None:
        """Delete an attempt's Job, pod and Secret, and see that they are gone. Tries for ever."""
        job, secret = f"{self.jobs}/{attempt.name}", f"{self.secrets}/{attempt.name}"
        wait_s, told, begun = FIRST_WAIT_S, False, time.monotonic()
        while True:
            try:
                await self.delete(job)
                await self.delete(secret)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(attempt.until_gone(), wait_s)
                if time.monotonic() - begun > GONE_S:
                    await self._force(attempt.name)
                if await self.get(job) is None and await self.get(secret) is None:
                    return
            except (ApiError, BackendError) as error:
                if not told:
                    told = True
                    log.warning("%s cannot be deleted yet: %s", attempt.name, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _force(self, job: str) -> None:
        """Delete the pods of a Job without waiting for their nodes to say that they have ended."""
        for pod in await self.list(self.pods, f"job-name={job}"):
            name = pod["metadata"]["name"]
            log.warning("pod %s does not end; deleting it by force", name)
            await self.delete(f"{self.pods}/{name}", gracePeriodSeconds=0)

    async def refusals(self, job: str) -> str:
        """Why the cluster makes no pod for a Job; '' if it says nothing of the kind."""
        selector = f"involvedObject.kind=Job,involvedObject.name={job}"
        try:
            found = await self._api.call("GET", self.events, query=[("fieldSelector", selector)])
        except ApiError:
            return ""  # it may not be allowed, and explains only
        failed = [one for one in found["items"] if one.get("reason") == "FailedCreate"]
        return (failed[-1].get("message") or "")[:400] if failed else ""


def run_id(run_dir: RunDir) -> str:
    """What a run's objects are found by, also by its later supervisors, also on another machine."""
    file = run_dir.path / "kubernetes.id"
    if not file.exists():
        write_private(file, secrets.token_hex(5))
    return file.read_text().strip()
