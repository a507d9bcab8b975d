"""Routes that show more of a run: the tokens of a rollout, the recipe, what of the agents lives at the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from aglite.control import shapes
from aglite.shown import shown

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor


def add_reading(app: FastAPI, supervisor: Supervisor, route: Callable[..., dict[str, Any]]) -> None:
    """Add them to `app`; `route` says what a route answers."""

    @app.get("/api/rollouts/{rollout_id}/tokens", **route(list[shapes.TokenSample], 404))
    async def list_tokens(rollout_id: str) -> Any:
        """The samples that the calls of its last attempt make, token by token, trained or not."""
        from aglite.show import rollout_tokens

        return await asyncio.to_thread(rollout_tokens, supervisor.store, supervisor.run_dir, rollout_id)

    @app.get("/api/recipe", **route(list[shapes.RecipeKey]))
    async def explain_recipe() -> Any:
        """Every key of the recipe as it holds."""
        from aglite.config.explain import explained

        return shown(explained(supervisor.recipe.dump()), supervisor.redactor)

    @app.get("/api/sandboxes", **route(list[shapes.Sandbox]))
    async def list_sandboxes() -> Any:
        """Attempts under way and where they run, and processes that outlived their rollout."""
        from aglite.sandboxes import sandboxes

        return await asyncio.to_thread(sandboxes, supervisor)
