"""What a person can do to a rollout, wherever it is shown: the keys of `keys.ROLLOUTS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from aglite import units
from aglite.tui.screens.confirm import Confirm

if TYPE_CHECKING:
    from aglite.tui.app import AgliteApp


class RolloutActions:
    """Adds the actions to a widget or screen; `chosen` gives the rollout's JSON, of which `id`, `state` and `task_id`
    are read."""

    ACTIONS: ClassVar = ("kill", "retry", "quarantine", "quarantine_task")
    app: AgliteApp

    def chosen(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def can(self, action: str) -> bool:
        """Whether it makes sense for the rollout as far as is known here; the supervisor may know better."""
        row = self.chosen()
        if row is None or not self.app.can_steer:
            return False
        if action == "kill":
            return row["state"] in units.UNFINISHED or row["state"] == "leaked"
        if action == "retry":
            return row["state"] in ("failed", "error", "cancelled")
        return row.get("split") == "train"

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in self.ACTIONS:
            return self.can(action)
        return super().check_action(action, parameters)  # type: ignore[misc]

    async def action_kill(self) -> None:
        row = self.chosen()
        if row is not None and self.can("kill"):
            text = f"{row['id']} on {row['task_id'] or 'a task'} is ended at once. Its group goes on without it."
            question = Confirm("End this rollout?", text, "End it")
            await self.app.confirm(question, _path(row, "kill"), f"{row['id'][:8]} is ended")

    def action_retry(self) -> None:
        row = self.chosen()
        if row is not None and self.can("retry"):
            self.app.steer(_path(row, "retry"), f"{row['id'][:8]} is launched again")

    async def action_quarantine(self) -> None:
        row = self.chosen()
        if row is not None and self.can("quarantine"):
            text = (
                f"{row['id']} will not be trained and leaves the baseline of its group; its reward is forgotten. "
                "If it runs, it is ended."
            )
            question = Confirm("Quarantine this rollout?", text, "Quarantine")
            await self.app.confirm(question, _path(row, "quarantine"), f"{row['id'][:8]} is quarantined")

    async def action_quarantine_task(self) -> None:
        row = self.chosen()
        if row is None or not self.can("quarantine_task"):
            return
        task = row["task_id"]
        where = f"tasks/{quote(task, safe='')}"
        if task in ((self.app.snapshot.status or {}).get("quarantined") or []):
            self.app.steer(f"{where}/release", f"task {task} is taken again")
            return
        text = (
            f"No new rollout of task {task} is started, those that run are ended, and none that was not trained yet is "
            "trained. The same key takes it again."
        )
        question = Confirm("Quarantine this task?", text, "Quarantine")
        await self.app.confirm(question, f"{where}/quarantine", f"task {task} is quarantined")


def _path(row: dict[str, Any], action: str) -> str:
    return f"rollouts/{quote(row['id'], safe='')}/{action}"
