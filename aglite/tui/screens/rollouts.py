"""All rollouts that are known, to sort, to filter and to steer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.widget import Widget

from aglite.tui.feed import Snapshot
from aglite.tui.screens.run import EMPTY
from aglite.tui.screens.view import View
from aglite.tui.widgets.queue import QueueDepth
from aglite.tui.widgets.rollouts import RolloutTable


class RolloutsScreen(View):
    NAME: ClassVar = "rollouts"

    def body(self) -> Iterable[Widget]:
        yield QueueDepth(id="states")
        yield RolloutTable(id="all-rollouts")

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self.query_one(RolloutTable).show(snapshot.rows, self.app.clock(), EMPTY[snapshot.link])
