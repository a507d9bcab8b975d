"""What graders asked a judge model."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from aglite.store.base import StoreBase, insert
from aglite.store.records import pack_json, without_text

KEYS = frozenset({"role", "type", "model", "object", "id", "finish_reason"})
"""Keys of the protocol's JSON that are no text of anybody's."""


class JudgeStore(StoreBase):
    async def add_judge_call(
        self,
        rollout_id: str,
        attempt: int,
        model: str,
        status: int,
        request: dict[str, Any],
        reply: dict[str, Any],
        started_at: float,
        finished_at: float,
    ) -> None:
        """Record one request of a grader to the judge. `status`: HTTP, 0 if the endpoint could not be reached."""
        if not self.keep_messages:
            request, reply = without_text(request), without_text(reply)
        elif self.redactor:
            request, reply = self.redactor.value(request, KEYS), self.redactor.value(reply, KEYS)
        row = {
            "rollout_id": rollout_id,
            "attempt": attempt,
            "model": model,
            "status": status,
            "request": pack_json(request),
            "reply": pack_json(reply),
            "started_at": started_at,
            "finished_at": finished_at,
        }

        def write(db: sqlite3.Connection) -> None:
            insert(db, "judge_calls", row)

        await self._write(write)

    def judge_calls(self, rollout_id: str) -> list[dict[str, Any]]:
        """What the graders of a rollout asked, in order: {attempt, model, status, request, reply, times}."""
        sql = """SELECT attempt, model, status, request, reply, started_at, finished_at FROM judge_calls
                 WHERE rollout_id = ? ORDER BY id"""
        return [
            {**dict(row), "request": json.loads(row["request"]), "reply": json.loads(row["reply"])}
            for row in self._rows(sql, (rollout_id,))
        ]
