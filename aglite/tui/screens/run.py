"""The run on one screen: metrics, rollouts, events."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Footer

from aglite.tui.feed import Snapshot
from aglite.tui.widgets.engine import EngineLoad
from aglite.tui.widgets.events import EventLog
from aglite.tui.widgets.header import RunHeader
from aglite.tui.widgets.host import HostLoad
from aglite.tui.widgets.notice import Notice
from aglite.tui.widgets.panel import Panel
from aglite.tui.widgets.phase import PhaseBar
from aglite.tui.widgets.queue import QueueDepth
from aglite.tui.widgets.reward import Reward
from aglite.tui.widgets.rollouts import RolloutTable

EMPTY = {
    "connecting": "waiting for the supervisor …",
    "live": "No rollouts yet: they appear here as soon as the model is loaded.",
    "lost": "no rollouts known",
    "died": "no rollouts recorded",
    "ended": "no rollouts recorded",
}


class RunScreen(Screen[None]):
    def compose(self) -> ComposeResult:
        yield RunHeader(id="header")
        yield PhaseBar(id="phase")
        yield Notice(id="notice")
        with Container(id="body"):
            with Container(id="metrics"):
                yield QueueDepth(id="queue")
                yield Reward(id="reward")
                with Container(id="load"):
                    yield EngineLoad(id="engine")
                    yield HostLoad(id="host")
            with Container(id="work"):
                yield RolloutTable(id="rollouts")
                yield EventLog(id="events")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(RolloutTable).focus()
        self.set_interval(1.0, self.tick)
        self.app.feed.start()  # type: ignore[attr-defined]

    def show(self, snapshot: Snapshot) -> None:
        for panel in self.query(Panel):
            panel.show(snapshot)
        self.query_one("#load").display = snapshot.link not in ("ended", "died")
        now = self.app.clock()  # type: ignore[attr-defined]
        self.query_one(RolloutTable).show(snapshot.rows, now, EMPTY[snapshot.link])
        if snapshot.status:
            self.query_one(EventLog).show(snapshot.status.get("log") or [])

    def tick(self) -> None:
        """Timers go on between two answers."""
        for panel in self.query(Panel):
            panel.tick()

    def on_rollout_table_opened(self, message: RolloutTable.Opened) -> None:
        from aglite.tui.screens.rollout import RolloutScreen

        self.app.push_screen(RolloutScreen(message.rollout_id))
