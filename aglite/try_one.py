"""`aglite run`: one rollout of one task, told in full, for writing a recipe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.models import resolve_model
from aglite.paths import RunDir, new_id
from aglite.supervisor import Supervisor
from aglite.tasks import load_tasks


def try_one(
    recipe: Recipe,
    task_id: str,
    *,
    checkpoint: Path | None = None,
    run_dir: RunDir | None = None,
    on_line: Callable[[str], None] = print,
) -> int:
    """`aglite run`: one rollout of one task, told in full; returns 0 if it was graded."""
    return TryOne(recipe, run_dir or RunDir(Path("runs") / f"{recipe.name}.try"), on_line, task_id, checkpoint).run()


class TryOne(Supervisor):
    """Runs one rollout without training, for writing a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDir,
        on_line: Callable[[str], None],
        task_id: str,
        checkpoint: Path | None,
    ) -> None:
        super().__init__(recipe, run_dir, on_line)
        self._task_id = task_id
        self._checkpoint = checkpoint

    async def work(self) -> int:
        task, split = await self._find_task()
        model = str(self._checkpoint or self.recipe.model)
        await self.runtime.start(await asyncio.to_thread(resolve_model, model, self.on_line), trainer=False)
        await self.phases.set("rollout", f"task {self._task_id}")
        group, rollout_id = new_id("g"), new_id("r")
        await self.store.add_tasks(split, [task])
        await self.store.add_group(group, task["id"], split, 1)
        await self.store.add_rollout(rollout_id, task["id"], group, split, self.recipe.agent.backend)
        outcome = await self.runtime.launcher.submit(rollout_id, task, split)
        for text in tell(self, rollout_id):
            self.on_line(text)
        await self.store.update_group(group, state="complete")
        return 0 if outcome.reward is not None else 1

    async def _find_task(self) -> tuple[dict[str, Any], str]:
        for split in ("train", "val"):
            rows = await asyncio.to_thread(load_tasks, getattr(self.recipe.tasks, split), self.recipe.folder, split)
            for row in rows:
                if row["id"] == self._task_id:
                    return row, split
        raise AgliteError(f"no task {self._task_id} in {self.recipe.name}", f"one of its tasks is {rows[0]['id']}")


def tell(supervisor: Supervisor, rollout_id: str) -> list[str]:
    """A rollout in plain words: each call's new messages and reply, the log's end, the reward."""
    store = supervisor.store
    rollout = store.rollout(rollout_id)
    lines = []
    for number, call in enumerate(store.calls(rollout_id), 1):
        cause = f", {call.fork_cause}" if call.fork_cause else ""
        lines.append(
            f"--- call {number} ({len(call.prompt_ids)} prompt + {len(call.response_ids)} sampled tokens{cause})"
        )
        lines += [f"{message['role']}: {_text(message)}" for message in store.messages(call)]
    log = supervisor.run_dir.rollout_log(rollout_id, rollout["attempt"])
    if log.is_file() and (text := log.read_text(errors="replace").strip()):
        lines += ["--- the agent's output", text]
    lines.append(f"--- {rollout['state']}{': ' + rollout['cause'] if rollout['cause'] else ''}")
    lines.append(f"reward {rollout['reward']}  {json.dumps(rollout['breakdown'])}")
    if rollout["flags"]:
        lines.append(f"flags {', '.join(rollout['flags'])}")
    return lines


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    calls = "".join(
        f" [calls {c['function']['name']}({c['function']['arguments']})]" for c in message.get("tool_calls") or []
    )
    return f"{content}{calls}"
