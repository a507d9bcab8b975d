"""From what an agent left to its reward: the copy, the flags, what the recipe makes of them, the grader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.config import Recipe
from aglite.paths import RunDir
from aglite.rollouts.backends import Backend
from aglite.rollouts.backends.local import remove_tree
from aglite.rollouts.causes import Cause
from aglite.rollouts.grading import Grade, Grader, GraderError
from aglite.rollouts.outcome import Ended
from aglite.rollouts.reaper import Reaper
from aglite.rollouts.signals import asks_for_git, has_marker
from aglite.units import encodable

if TYPE_CHECKING:
    from aglite.rollouts.judge import Judge
    from aglite.store import Store
    from aglite.store.records import StoredCall

Said = Mapping[int, tuple[Sequence[Mapping[str, Any]], Mapping[str, Any] | None]]
"""Of calls, by id: the messages of the prompt, and the reply if there is one."""


class Judging:
    """Grades what attempts leave. Its copies lie in the run's scratch folder for as long as a grading takes."""

    def __init__(self, recipe: Recipe, run_dir: RunDir, store: Store, reaper: Reaper, backend: Backend) -> None:
        assert recipe.reward is not None
        self._reward = recipe.reward
        self._run_dir = run_dir
        self._scratch = run_dir.scratch.resolve()  # graders have working directories of their own
        self._store = store
        self._grader = Grader(recipe, reaper, backend.start if recipe.agent.in_container else None)
        self._keeps_text = recipe.retention.traffic == "all"
        self._redactor = recipe.stored_redactor
        self._has_graded = False
        self._judge: Judge | None = None
        if recipe.reward.judge:
            from aglite.rollouts.judge import Judge  # its HTTP client is no small import

            self._judge = Judge(recipe.reward.judge, store)

    @property
    def skips_failures(self) -> bool:
        return self._grader.skips_failures

    async def start(self) -> None:
        """Delete what an earlier supervisor left, and be ready. Raises RecipeError without the judge's key."""
        for folder in self._scratch.glob("*.grade*"):
            await asyncio.to_thread(remove_tree, folder)
        if self._judge:
            await self._judge.start()

    async def stop(self) -> None:
        if self._judge:
            await self._judge.stop()

    async def judge(
        self,
        rollout_id: str,
        attempt: int,
        task: Mapping[str, Any],
        split: str,
        workdir: Path,
        ended: Ended,
        stop: asyncio.Future[Any],
    ) -> None:
        """Give `ended` its grade, and what was noticed as flags; or a cause, if it cannot be graded or the recipe fails
        it for a flag. Without either, `stop` was done first."""
        left = self._scratch / f"{rollout_id}.{attempt}.grade"
        log = self._run_dir.rollout_log(rollout_id, attempt)
        env = self._judge.open(rollout_id, attempt) if self._judge else {}
        try:
            try:
                await self._take(task, workdir, left, log, ended)
            except OSError as error:
                ended.cause = Cause("lost", f"what the agent left could not be copied: {error}")
                return
            said = await asyncio.to_thread(self._store.conversations, rollout_id, attempt)
            if await asyncio.to_thread(asks_for_git, [reply for _, reply in said.values() if reply]):
                ended.flags.append("read_git")
            if self._sentence(ended):
                return
            facts = {
                "id": rollout_id,
                "attempt": attempt,
                "split": split,
                "exit_code": ended.exit_code,
                "cause": str(ended.cause or ""),
                "limits_hit": ended.limits_hit,
                "flags": ended.flags,
                **conversations(await asyncio.to_thread(self._store.calls, rollout_id, attempt), said),
            }
            ended.grade = await self._grader.grade(task, facts, left, log=log, stop=stop, env=env)
            if ended.grade:
                self._has_graded = True
                ended.flags += ended.grade.flags
                self._sentence(ended)
        except GraderError as error:
            # A failed agent left nothing that the grader could make sense of; one that ended well may do so on purpose.
            # A grader that has graded none is broken, whatever the agents do.
            if (ended.cause and error.raised) or (self._reward.on_error == "zero" and self._has_graded):
                ended.grade = Grade(0.0)
                await asyncio.to_thread(self._note, log, f"--- not graded ---\n{error}\n")
                ended.flags.append("ungraded")
            else:
                ended.cause = Cause("grader", str(error))
        finally:
            if self._judge:
                self._judge.close(env)
            await asyncio.to_thread(remove_tree, left)

    async def _take(self, task: Mapping[str, Any], workdir: Path, left: Path, log: Path, ended: Ended) -> None:
        found = await asyncio.to_thread(self._grader.collect, task, workdir, left)
        flags = set(found.flags)
        if await asyncio.to_thread(_has_marker, log):
            flags.add("printed_marker")
        ended.flags += sorted(flags - set(ended.flags))
        if found.refused:
            names = "\n".join(map(repr, found.refused))
            await asyncio.to_thread(self._note, log, f"--- not taken from what the agent left ---\n{names}\n")

    def _note(self, log: Path, text: str) -> None:
        """Add to a rollout's log what has a place in it: where its text is kept, masked like the rest."""
        if self._keeps_text:
            with contextlib.suppress(OSError), log.open("a") as file:  # a full disk costs the note, not the rollout
                file.write(self._redactor.text(encodable(text)))

    def _sentence(self, ended: Ended) -> bool:
        """Do as `reward.on_flag` says; whether that settles the reward."""
        rules = self._reward.on_flag
        found = [(flag, getattr(rules, flag)) for flag in ended.flags if flag in type(rules).model_fields]
        failing = [flag for flag, what in found if what == "fail"]
        if failing and ended.cause is None:
            ended.cause = Cause("flagged", ", ".join(failing))
        if failing or any(what == "zero" for _, what in found):
            ended.grade = Grade(0.0)
            return True
        return False


def conversations(calls: Sequence[StoredCall], said: Said) -> dict[str, Any]:
    """What a grader is told of an attempt's calls: `calls`, their number; `conversations`, lists of messages, one for
    each call that no later call continues; `messages`, the last of these."""
    continued = {call.matched_id for call in calls}
    found = []
    for call in calls:
        if call.id not in continued:
            prompt, reply = said[call.id]
            found.append([*prompt, *([reply] if reply else [])])
    return {"calls": len(calls), "conversations": found, "messages": found[-1] if found else []}


def _has_marker(log: Path) -> bool:
    """Whether what the agent printed (as far as it was kept) holds something like a grader's result."""
    try:
        return has_marker(log.read_bytes())
    except FileNotFoundError:
        return False
