"""A run read from its database alone: what ControlClient answers while a supervisor runs, this answers afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from aglite.history import database_bytes, history, live_steps
from aglite.paths import RunDir
from aglite.show import rollout_detail, rollout_tokens
from aglite.shown import redactor_of, shown
from aglite.store import Store
from aglite.store.old import readable


class StoredRun:
    """Reads a run directory; nothing in it is changed. Raises StoreError where the file is no database of aglite."""

    pid = None

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._opened = ExitStack()
        self.store: Store = self._opened.enter_context(readable(run_dir.db))
        self._redactor = redactor_of(self.store)

    def close(self) -> None:
        self._opened.close()

    def status(self) -> dict[str, Any]:
        """The keys of `GET /api/status` that outlive the supervisor; `pid` is None."""
        store = self.store
        manifest = store.meta("manifest") or {}
        recipe = manifest.get("recipe") or {}
        steps = live_steps(store)
        phases = store.phases(limit=1)
        ended = phases[-1] if phases else None
        message = ""  # a run that did not come to its first phase has none
        if ended:
            clean = ended["phase"] == "stopped"
            message = ended["cause"] if clean else f"the supervisor died while {ended['phase']}"
        status = {
            "run": recipe.get("name", self.run_dir.path.name),
            "recipe": recipe.get("name", self.run_dir.path.name),
            "model": recipe.get("model", ""),
            "dir": str(self.run_dir.path),
            "pid": None,
            "mode": (recipe.get("algorithm") or {}).get("mode", ""),
            "phase": "stopped",
            "phase_since": ended["started_at"] if ended else None,
            "message": message,
            "policy_version": steps[-1]["version"] if steps else 0,
            "step": steps[-1]["step"] if steps else 0,
            "steps": (recipe.get("trainer") or {}).get("steps", 0),
            "eta_s": None,
            "gate": None,
            "engine": None,
            "gpu": [],
            "host": {"db_bytes": database_bytes(self.run_dir.db)},
            **history(store),
        }
        return shown(status, self._redactor)

    def rollouts(
        self, *, state: str | None = None, step: int | None = None, limit: int | None = None, after: str | None = None
    ) -> list[dict[str, Any]]:
        return shown(self.store.rollouts(state=state, step=step, limit=limit, after=after), self._redactor)

    def rollout(self, rollout_id: str, *, tokens: bool = False) -> dict[str, Any]:
        return rollout_detail(self.store, self.run_dir, rollout_id, tokens=tokens)

    def tokens(self, rollout_id: str) -> list[dict[str, Any]]:
        return rollout_tokens(self.store, self.run_dir, rollout_id)

    def recipe(self) -> list[dict[str, Any]]:
        from aglite.config.explain import explained

        return shown(explained((self.store.meta("manifest") or {}).get("recipe") or {}), self._redactor)

    def sandboxes(self) -> list[dict[str, Any]]:
        return []

    def steps(self) -> list[dict[str, Any]]:
        return self.store.steps()

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        while rows := self.store.events(after=after, limit=500):
            yield from shown(rows, self._redactor)
            after = rows[-1]["id"]
