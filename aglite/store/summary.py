"""Sums over a whole run, for reports: made by SQLite, so that a long run takes no more memory than a short one."""

from __future__ import annotations

from aglite.store.base import StoreBase


class SummaryStore(StoreBase):
    def durations(self, split: str) -> list[float]:
        """Seconds from launch to end, grading and time held included, of every rollout of a split that was launched and
        has ended; the shortest first."""
        sql = """SELECT finished_at - started_at AS seconds FROM rollouts
                 WHERE split = ? AND started_at IS NOT NULL AND finished_at IS NOT NULL ORDER BY seconds"""
        return [row["seconds"] for row in self._rows(sql, (split,))]

    def tokens(self) -> dict[str, dict[str, int]]:
        """By split, over all attempts: {calls, prompt_tokens (each turn's prompt whole), sampled_tokens}."""
        sql = """SELECT r.split, count(*) AS calls, total(c.prompt_len) AS prompt_tokens,
                        total(c.response_len) AS sampled_tokens
                 FROM calls c JOIN rollouts r ON r.id = c.rollout_id GROUP BY r.split
                 UNION ALL
                 SELECT split, total(json_extract(pruned, '$.calls')), total(json_extract(pruned, '$.prompt_tokens')),
                        total(json_extract(pruned, '$.sampled_tokens'))
                 FROM rollouts WHERE pruned IS NOT NULL GROUP BY split"""
        sums: dict[str, dict[str, int]] = {}
        for row in self._rows(sql):
            of_split = sums.setdefault(row["split"], dict.fromkeys(("calls", "prompt_tokens", "sampled_tokens"), 0))
            for name in of_split:
                of_split[name] += int(row[name])
        return sums

    def progress(self) -> tuple[int, ...]:
        """Numbers that change whenever a step or an evaluation comes, ends or is rolled back."""
        sql = """SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM steps WHERE state = 'rolled_back'),
                        (SELECT count(*) FROM evaluations WHERE state = 'done'),
                        (SELECT count(*) FROM evaluations WHERE state = 'rolled_back')"""
        return tuple(self._rows(sql)[0])

    def problems(self, limit: int) -> list[dict[str, object]]:
        """The last warnings and errors among the events, in order: {at, level, kind, text}."""
        sql = "SELECT at, level, kind, text FROM events WHERE level != 'info' ORDER BY id DESC LIMIT ?"
        return [dict(row) for row in reversed(self._rows(sql, (limit,)))]
