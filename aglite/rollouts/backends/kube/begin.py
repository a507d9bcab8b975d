"""The steps from a launch to an agent that runs: its objects are made, its pod is reached, its files are sent."""

from __future__ import annotations

import asyncio
from typing import IO, Any

from aglite.errors import RecipeError
from aglite.rollouts.backends.contained import FOLDER
from aglite.rollouts.backends.kube import exec as execs
from aglite.rollouts.backends.kube.api import Api, ApiError, NoAnswer, refused
from aglite.rollouts.backends.kube.attempt import Attempt
from aglite.rollouts.backends.kube.lease import Lease
from aglite.rollouts.backends.kube.objects import Objects
from aglite.rollouts.backends.kube.pods import IN
from aglite.rollouts.causes import BackendError, Cause

EXPLAIN_S = 3.0
"""How long a pod may take to appear before it is asked why there is none."""
FILLED_S = 15.0
"""How long the watch may take to tell that a container has ended."""


async def make(objects: Objects, attempt: Attempt, job: dict[str, Any], secret: dict[str, Any], most_s: int) -> None:
    """Create an attempt's Job, whose template may say how long it lasts at most, and its Secret.

    The Secret comes second, so that from its beginning it belongs to the Job, and goes with it should nobody be left
    to delete it. Its pod does not need it before its files are there.
    """

    def waits(text: str) -> None:
        attempt.waits_for = text
        lease.begin()

    lease = Lease(job["spec"].get("activeDeadlineSeconds", most_s))
    job["spec"]["activeDeadlineSeconds"] = lease.lasts_s
    made = await objects.make(objects.jobs, job, waits)
    attempt.lease = lease
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": attempt.name, "uid": made["metadata"]["uid"]}
    secret["metadata"]["ownerReferences"] = [owner]
    await objects.make(objects.secrets, secret, waits)


async def reach(objects: Objects, attempt: Attempt) -> None:
    """Wait until the pod waits for its files."""
    reached = asyncio.ensure_future(attempt.until("files"))
    try:
        while not reached.done():
            await asyncio.wait({reached}, timeout=EXPLAIN_S)
            if not attempt.pod and not reached.done():
                why = await objects.refusals(attempt.name)
                if "violates PodSecurity" in why:
                    raise RecipeError(f"agent.kubernetes: {why}", "choose another namespace, or correct the template")
                if why and "exceeded quota" not in why:
                    raise BackendError(Cause("launch", why))
                attempt.waits_for = why or attempt.waits_for
        await reached
    finally:
        reached.cancel()


async def fill(api: Api, attempt: Attempt, archive: IO[bytes], size: int) -> None:
    """Send the files, until they are there."""
    attempt.waits_for = "its files are being sent"
    while not attempt.is_past("filled"):
        attempt.check()
        try:
            await execs.fill(api, attempt.pod, IN, FOLDER, archive, size)
            return
        except (NoAnswer, ApiError, execs.ExecError) as error:
            # The container ends as soon as it has its files, maybe before it could say so, and the command with it.
            done = asyncio.ensure_future(attempt.until("filled"))
            await asyncio.wait({done}, timeout=FILLED_S if isinstance(error, execs.ExecError) else 1.0)
            done.cancel()
            if attempt.is_past("filled"):
                return
            if isinstance(error, ApiError) and error.status not in (404, 409):
                raise refused(error, "files to be sent (exec)") from error
            if isinstance(error, execs.ExecError):
                raise BackendError(Cause("launch", f"its files: {error}")) from error
            attempt.waits_for = f"its files cannot be sent: {error}"
