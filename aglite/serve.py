"""`aglite serve`: gateway and engine only, so that any agent can use a trained model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aglite.config import parse_recipe
from aglite.paths import RunDir
from aglite.supervisor import Supervisor


def serve(
    model: str,
    *,
    engine: dict[str, Any] | None = None,
    port: int = 0,
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> int:
    """Gateway and engine only, until interrupted: any agent can use the model, and what it does is recorded.

    `engine` is the section of a recipe, where it is not the embedded one. Raises RecipeError if it cannot be used.
    """
    recipe = parse_recipe(
        {
            "name": "serve",
            "model": model,
            "tasks": {"train": "none", "val": "none"},
            "agent": {"backend": "external"},
            "engine": engine or {},
            "gateway": {"port": port},
            "sampling": {"train": {"temperature": 1.0}},
        },
        Path("aglite serve"),
    )
    return ServeSupervisor(recipe, run_dir or RunDir(Path("runs/serve")), on_line).run()


class ServeSupervisor(Supervisor):
    """Serves a model or checkpoint; requests need no rollout token and are recorded as external rollouts."""

    async def work(self) -> int:
        name = Path(self.recipe.model).expanduser().resolve().name
        await self.runtime.start(self.recipe.model, trainer=False, model_name=name)
        self.runtime.gateway.serve_open = True
        await self.phases.set("rollout", "serving")
        self.on_line(f"serving {name} on {self.runtime.url}/v1 (any API key; Ctrl-C ends it)")
        self.on_line(f"  export OPENAI_BASE_URL={self.runtime.url}/v1 OPENAI_API_KEY=local")
        await asyncio.Event().wait()
        return 0

    def stop(self, *, now: bool = False) -> None:
        if self._work is not None:
            self._work.cancel("stop")
