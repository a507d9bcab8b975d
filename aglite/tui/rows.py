"""The rollouts that the table shows: pages of the API merged by id, what runs first. No drawing here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aglite.units import UNFINISHED

KEPT = 1000
"""Rows kept; older finished ones are in the database."""
PAGE = 50

Row = dict[str, Any]


class Rows:
    """Merges pages (newest first) and keeps the order: running, then finished (latest first), then queued."""

    def __init__(self) -> None:
        self._by_id: dict[str, Row] = {}
        self.ordered: list[Row] = []

    def merge(self, page: Iterable[Row]) -> None:
        for row in page:
            self._by_id[row["id"]] = row
        self.ordered = sorted(self._by_id.values(), key=_place)
        if len(self.ordered) > KEPT:
            for row in sorted(self.ordered, key=lambda row: row["created_at"])[: len(self.ordered) - KEPT]:
                if row["state"] not in UNFINISHED:
                    del self._by_id[row["id"]]
            self.ordered = sorted(self._by_id.values(), key=_place)

    def clear(self) -> None:
        self._by_id.clear()
        self.ordered = []

    def wanted(self) -> int:
        """How many of the newest rows a poll must ask for so that none that can still change is missed."""
        newest_first = sorted(self._by_id.values(), key=lambda row: -row["created_at"])
        oldest = max((i for i, row in enumerate(newest_first) if row["state"] in UNFINISHED), default=0)
        return min(oldest + PAGE, KEPT)


def _place(row: Row) -> tuple[int, float]:
    if row["state"] == "queued":
        return 2, row["created_at"]
    if row["state"] in UNFINISHED:
        return 0, row["started_at"] or row["created_at"]
    return 1, -(row["finished_at"] or row["created_at"])
