"""From `agent.backend` to the place itself. A backend's library is imported only where a recipe asks for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.rollouts.backends import Backend
from aglite.rollouts.backends.local import LocalBackend
from aglite.rollouts.environment import program_of
from aglite.rollouts.plans import plan_of
from aglite.rollouts.reaper import Reaper

if TYPE_CHECKING:
    from aglite.rollouts.backends.sidecars import Serve


def make_backend(recipe: Recipe, run_dir: RunDir, reaper: Reaper, serve: Serve | None) -> Backend:
    """The place that a recipe's agents run in. `serve`: see Launcher."""
    agent = recipe.agent
    if agent.backend == "docker":
        from aglite.rollouts.backends.docker import DockerBackend

        if serve is None:
            raise AgliteError("there is no gateway that containers could reach", "give the launcher a `serve`")
        return DockerBackend(run_dir, reaper, agent, _programs(recipe), serve)
    if agent.backend == "kubernetes":
        from aglite.rollouts.backends.kube.backend import KubernetesBackend

        return KubernetesBackend(run_dir, recipe, _programs(recipe))
    return LocalBackend(run_dir, reaper, agent.concurrency)


def _programs(recipe: Recipe) -> dict[str, str]:
    """What is started in containers, by the setting that names it."""
    found = {"agent.command": program_of(recipe)}
    if recipe.reward is not None:
        grader = plan_of(recipe)
        if grader.in_container:
            found[grader.field] = grader.program
    return found


async def check_backend(recipe: Recipe) -> None:
    """Raise RecipeError if what the recipe asks for is not there. Quick, and changes nothing."""
    if recipe.agent.backend == "docker":
        from aglite.rollouts.backends.docker import check_engine

        await asyncio.to_thread(check_engine, recipe.agent)
    elif recipe.agent.backend == "kubernetes":
        from aglite.rollouts.backends.kube.check import check_recipe

        await check_recipe(recipe)
