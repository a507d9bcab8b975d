"""The terminal UI of a run: it reads through the control API, and from the database when no supervisor runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.stored import StoredRun
from aglite.tui.feed import INTERVAL_S, Feed, Snapshot
from aglite.tui.keys import APP, bindings
from aglite.tui.screens.help import HelpScreen
from aglite.tui.screens.quit import QuitScreen
from aglite.tui.screens.run import RunScreen
from aglite.tui.themes import DARK, LIGHT, preferred
from aglite.tui.widgets.panel import NOTHING


class AgliteApp(App[str]):
    """`run()` returns `stop` when the person wants the run stopped, else None or `leave`."""

    CSS_PATH = "app.tcss"
    TITLE = "aglite"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: ClassVar = [(0, "-slim"), (72, "-narrow"), (132, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar = [(0, "-flat"), (20, "-low"), (36, "-tall")]
    BINDINGS = bindings(APP)

    def __init__(
        self, run_dir: RunDir, *, clock: Callable[[], float] = time.time, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.clock = clock
        self.snapshot = NOTHING
        self.feed = Feed(run_dir, self._deliver, clock=clock, interval_s=interval_s)
        self.run_screen = RunScreen()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = preferred()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return dict(DARK.variables)

    def get_default_screen(self) -> RunScreen:
        return self.run_screen

    def on_unmount(self) -> None:
        self.feed.stop()

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout in full, from the supervisor while one runs, else from the database. Raises AgliteError."""
        if self.feed.client.pid is not None:
            return self.feed.client.rollout(rollout_id)
        stored = StoredRun(self.run_dir)
        try:
            return stored.rollout(rollout_id)
        finally:
            stored.close()

    # news from the feed's thread

    def _deliver(self, snapshot: Snapshot) -> None:
        self.call_later(self._show, snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.run_screen.show(snapshot)
        self.refresh_bindings()

    # actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that make no sense now are not offered."""
        live = self.snapshot.link in ("live", "lost")
        phase = (self.snapshot.status or {}).get("phase")
        if action == "pause":
            return live and phase not in (None, "paused", "starting", "stopped")
        if action == "resume":
            return live and phase == "paused"
        if action == "detach":
            return live
        return True

    def action_pause(self) -> None:
        self._ask("pause", "pausing: what is being sampled stops at its next token")

    def action_resume(self) -> None:
        self._ask("resume", "going on")

    def _ask(self, what: str, said: str) -> None:
        def post() -> None:
            try:
                self.feed.client.post(what)
            except AgliteError as error:
                self.call_from_thread(self._refused, what, error)
            else:
                self.call_from_thread(self.notify, said)
                self.feed.hurry()

        self.run_worker(post, thread=True)

    def _refused(self, what: str, error: AgliteError) -> None:
        self.notify(str(error), title=f"cannot {what}", severity="error", markup=False)

    def action_detach(self) -> None:
        self.exit("leave")

    def action_help_quit(self) -> None:
        """Ctrl-C: the same question as for q."""
        self.run_worker(self.action_quit())

    async def action_quit(self) -> None:
        if self.snapshot.link not in ("live", "lost"):
            self.exit("leave")
        elif not isinstance(self.screen, QuitScreen):
            run = (self.snapshot.status or {}).get("run", "The run")
            self.push_screen(QuitScreen(run), self._leave)

    def _leave(self, wish: str | None) -> None:
        if wish:
            self.exit(wish)

    def action_show_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_toggle_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name
