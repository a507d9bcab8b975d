"""What the accelerator is doing, one phase at a time, each kept with its start, end and cause."""

from __future__ import annotations

import time

from aglite.store import Store

PHASES = ("starting", "rollout", "evaluating", "draining", "sleeping", "training", "syncing", "paused", "stopped")

_NEXT = {
    "starting": {"rollout", "evaluating"},
    "rollout": {"draining", "evaluating"},
    "evaluating": {"rollout", "draining"},
    "draining": {"sleeping", "training"},
    "sleeping": {"training"},
    "training": {"syncing", "rollout"},
    "syncing": {"rollout", "evaluating", "training"},
    "paused": {"rollout", "evaluating"},
}


class PhaseMachine:
    """Moves through the phases in their only possible order and writes each change down.

    `paused` can follow `rollout` and `evaluating`, `stopped` can follow anything; any other step out of order is a
    programming error and raises RuntimeError.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.current = "stopped"
        self.since = time.time()
        self.last_update_s = 0.0
        """How long agents were held by the last update, from the closing of the gate to its reopening."""
        self._closed_at: float | None = None

    async def set(self, phase: str, cause: str = "") -> None:
        """Enter `phase`; nothing happens if it is the current one."""
        if phase == self.current:
            return
        self._check(phase)
        now = time.time()
        if phase == "draining":
            self._closed_at = now
        elif phase == "stopped":  # a run may start over; what was held then ended with it
            self._closed_at = None
        elif phase in ("rollout", "evaluating") and self._closed_at is not None:
            self.last_update_s, self._closed_at = now - self._closed_at, None
        self.current, self.since = phase, now
        await self._store.set_phase(phase, cause)
        await self._store.add_event("info", "phase", f"{phase}: {cause}" if cause else phase, {"phase": phase})

    def _check(self, phase: str) -> None:
        allowed = {"starting"} if self.current == "stopped" else _NEXT[self.current] | {"stopped"}
        if self.current in ("rollout", "evaluating"):
            allowed = allowed | {"paused"}
        if phase not in allowed:
            raise RuntimeError(f"phase {phase} cannot follow {self.current}")
