"""The terminal UI of a run: it reads through the control API, and from the database when no supervisor runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from textual import events
from textual.app import App
from textual.widgets import Input

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.tui.commands import KeyCommands
from aglite.tui.feed import INTERVAL_S, Feed, Snapshot
from aglite.tui.keys import APP, GO, SCREENS, STEER, bindings
from aglite.tui.screens.confirm import AskNumber, Confirm
from aglite.tui.screens.quit import QuitScreen
from aglite.tui.screens.view import View
from aglite.tui.source import Source
from aglite.tui.themes import DARK, LIGHT, PLAIN, dark, preferred
from aglite.tui.widgets.panel import NOTHING

MOST_AT_ONCE = 4096


class AgliteApp(App[str]):
    """`run()` returns `stop` when the person wants the run stopped, else None or `leave`."""

    CSS_PATH = "app.tcss"
    TITLE = "aglite"
    COMMANDS: ClassVar = {KeyCommands}
    COMMAND_PALETTE_BINDING = "ctrl+p"
    HORIZONTAL_BREAKPOINTS: ClassVar = [(0, "-slim"), (72, "-narrow"), (132, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar = [(0, "-flat"), (20, "-low"), (36, "-tall")]
    BINDINGS = bindings(GO, STEER, APP)
    DEFAULT_MODE = "run"

    def __init__(
        self,
        run_dir: RunDir,
        *,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.readonly = readonly
        self.clock = clock
        self.snapshot = NOTHING
        self.feed = Feed(run_dir, self._deliver, clock=clock, interval_s=interval_s)
        self.source = Source(run_dir, self.feed.client)
        self._keys_for: Any = None
        for theme in (DARK, LIGHT, PLAIN):
            self.register_theme(theme)
        self.theme = preferred(self.console.color_system)
        for name in SCREENS:
            self.add_mode(name, partial(_screen, name))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return dict(DARK.variables)

    def on_mount(self) -> None:
        self.feed.start()

    def on_unmount(self) -> None:
        self.feed.stop()

    async def on_event(self, event: events.Event) -> None:
        """Let keys act in the order they are typed in.

        Textual gives a key to what has the focus, and looks for what it is bound to when it comes back from there. Keys
        that came with it, as they do over SSH, have gone to the same place by then: `/` and a word would not search but
        press each letter. Where one types text, the line itself sees to the order.
        """
        if not isinstance(event, events.Key) or event.is_forwarded:
            await super().on_event(event)
            return
        self.app_focus = True
        if isinstance(self.focused, Input):
            await super().on_event(event)
        elif not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)

    # news from the feed's thread

    def _deliver(self, snapshot: Snapshot) -> None:
        self.call_later(self._show, snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        for screen in reversed(self.screen_stack):
            if isinstance(screen, View):
                screen.show(snapshot)
                break
        keys_for = (snapshot.link, (snapshot.status or {}).get("phase"))
        if keys_for != self._keys_for:
            self._keys_for = keys_for
            self.screen.refresh_bindings()

    # going from screen to screen

    # each is waited for: only then can a screen take the next key

    async def action_go(self, name: str) -> None:
        """Open a screen; of one that is open, what it was opened from."""
        while len(self.screen_stack) > 1:
            await self.pop_screen()
        if self.current_mode != name:
            await self.switch_mode(name)

    async def open_rollout(self, rollout_id: str, beside: Sequence[dict[str, Any]], *, page: str = "messages") -> None:
        """Show one rollout; `beside` are the rows of the list it stands in."""
        from aglite.tui.screens.rollout import RolloutScreen

        await self.push_screen(RolloutScreen(rollout_id, [each["id"] for each in beside], page=page))

    async def show_step(self, step: int) -> None:
        """Show the rollouts that a step trained."""
        from aglite.tui.screens.step_rollouts import StepRollouts

        await self.push_screen(StepRollouts(step))

    # steering

    @property
    def can_steer(self) -> bool:
        return not self.readonly and self.snapshot.link in ("live", "lost")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that make no sense now are not offered."""
        phase = (self.snapshot.status or {}).get("phase")
        if action == "pause":
            return self.can_steer and phase not in (None, "paused", "starting", "stopped")
        if action == "resume":
            return self.can_steer and phase == "paused"
        if action == "preempt":
            return self.can_steer and phase == "draining"
        if action in ("checkpoint", "evaluate", "stop_after_step"):
            return self.can_steer and phase not in (None, "starting", "stopped")
        if action == "concurrency":
            return self.can_steer and bool((self.snapshot.status or {}).get("concurrency"))
        if action == "detach":
            return self.snapshot.link in ("live", "lost")
        return True

    def steer(self, what: str, said: str, body: dict[str, Any] | None = None) -> None:
        """POST `what` to the supervisor in a thread, and say how that went."""

        def post() -> None:
            try:
                self.feed.client.post(what, body)
            except AgliteError as error:
                self.call_from_thread(self._refused, error)
            else:
                self.call_from_thread(self.notify, said, markup=False)
                self.feed.hurry()

        self.run_worker(post, thread=True)

    async def confirm(self, question: Confirm, what: str, said: str, body: dict[str, Any] | None = None) -> None:
        """Ask, and `steer` if the person is sure."""
        await self.push_screen(question, lambda sure: self.steer(what, said, body) if sure else None)

    def _refused(self, error: AgliteError) -> None:
        self.notify(str(error), title="not done", severity="error", markup=False)

    def action_pause(self) -> None:
        self.steer("pause", "pausing: what is being sampled stops at its next token")

    def action_resume(self) -> None:
        self.steer("resume", "going on")

    def action_preempt(self) -> None:
        self.steer("preempt", "what is being sampled stops at its next token")

    def action_checkpoint(self) -> None:
        self.steer("checkpoint", "a checkpoint is written before the next step")

    def action_evaluate(self) -> None:
        self.steer("evaluate", "the policy in force is evaluated before the next step")

    async def action_stop_after_step(self) -> None:
        text = "The run ends when the next step is trained, with a checkpoint. `aglite up` goes on from there."
        question = Confirm("Stop after this step?", text, "Stop then")
        await self.confirm(question, "stop", "stopping after this step", {"after_step": True})

    async def action_concurrency(self) -> None:
        now = (self.snapshot.status or {})["concurrency"]
        text = "Rollouts that run at once, until the supervisor is started again. Those that run go on to their end."

        def ask(number: int | None) -> None:
            if number is not None and number != now:
                self.steer("concurrency", f"{number} rollouts at once from now on", {"rollouts": number})

        await self.push_screen(AskNumber("How many rollouts at once?", text, now, low=1, high=MOST_AT_ONCE), ask)

    # leaving

    def action_detach(self) -> None:
        self.exit("leave")

    def action_help_quit(self) -> None:
        """Ctrl-C: the same question as for q."""
        self.run_worker(self.action_quit())

    async def action_quit(self) -> None:
        if not self.can_steer:
            self.exit("leave")
        elif not isinstance(self.screen, QuitScreen):
            run = (self.snapshot.status or {}).get("run", "The run")
            await self.push_screen(QuitScreen(run), self._leave)

    def _leave(self, wish: str | None) -> None:
        if wish:
            self.exit(wish)

    async def action_show_help(self) -> None:
        from aglite.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            await self.push_screen(HelpScreen())

    def action_toggle_theme(self) -> None:
        self.theme = dark(self.console.color_system) if self.theme == LIGHT.name else LIGHT.name


def _screen(name: str) -> View:
    """Make a screen; the code of most is only read when they are first opened."""
    return getattr(import_module(f"aglite.tui.screens.{name}"), f"{name.capitalize()}Screen")()
