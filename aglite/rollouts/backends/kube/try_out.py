"""A Job that only looks for programs, before the first rollout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aglite.config import Agent
from aglite.errors import RecipeError
from aglite.paths import RunDir
from aglite.redact import Redactor
from aglite.rollouts.backends import Launch
from aglite.rollouts.causes import BackendError

if TYPE_CHECKING:
    from aglite.rollouts.backends.kube.backend import KubernetesBackend

log = logging.getLogger("aglite.rollouts")

FIND = 'n=0; for program; do n=$((n + 1)); command -v "$program" || exit $n; done'
"""Its exit code is the number of the first program that is not there."""


async def try_out(backend: KubernetesBackend, agent: Agent, programs: Mapping[str, str], run_dir: RunDir) -> None:
    """Run a Job that only looks for the programs: what is wrong with image, template or permissions shows now. Raises
    RecipeError; a cluster that has no room at the moment is no reason not to begin."""
    # others with a slash are files of the recipe
    looks = {name: word for name, word in programs.items() if "/" not in word or word.startswith("/")}
    launch = Launch(
        rollout_id="check",
        attempt=int(time.time()),
        command=["sh", "-c", FIND, "sh", *looks.values()],
        files=[],
        home_files={},
        stdin="",
        task={},
        env={},
        limits=agent.limits,
        log=run_dir.logs / "kubernetes-check.log",
        redactor=Redactor(()),
    )
    try:
        running = await backend.start(launch)
        try:
            exit = await asyncio.wait_for(asyncio.shield(running.exited), agent.kubernetes.start_timeout_s)
        finally:
            await running.stop()
            await running.remove()
            launch.log.unlink(missing_ok=True)
    except (BackendError, TimeoutError) as error:
        if isinstance(error, BackendError) and error.cause.code == "image":
            raise RecipeError(
                f"agent.image: the cluster cannot have it: {error.cause.detail}",
                "push it to a registry that the nodes reach, and let the namespace's service account pull from it",
            ) from None
        log.warning("programs could not be looked for in the cluster: %s", error)
        return
    if exit.cause is None and 0 < exit.code <= len(looks):
        setting, program = list(looks.items())[exit.code - 1]
        raise RecipeError(f"{setting}: {agent.image} has no program {program!r}", "install it in the image")
