"""What the screens share: the lines around them, news from the feed, questions asked in a thread, searching."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.widget import Widget

from aglite.client import ControlClient
from aglite.errors import AgliteError
from aglite.stored import StoredRun
from aglite.tui.feed import Snapshot
from aglite.tui.keys import FIND, bindings
from aglite.tui.widgets.header import RunHeader
from aglite.tui.widgets.keybar import KeyBar
from aglite.tui.widgets.notice import Notice
from aglite.tui.widgets.pages import Pages
from aglite.tui.widgets.panel import Panel
from aglite.tui.widgets.search import Search
from aglite.tui.widgets.table import Table
from aglite.tui.widgets.tabs import Tabs

if TYPE_CHECKING:
    from aglite.tui.app import AgliteApp

TICK_S = 1.0

Question = Callable[[ControlClient | StoredRun], Any]


class View(Screen[None]):
    """A screen between header and keys. A subclass gives `body`."""

    NAME: ClassVar[str] = ""
    BINDINGS = bindings(FIND)

    _searched: Table | Pages | None = None
    """What the line at the bottom searches; the focus, which may decide that, is on the line meanwhile."""
    _told_at = 0.0

    if TYPE_CHECKING:

        @property
        def app(self) -> AgliteApp: ...

    def compose(self) -> ComposeResult:
        yield RunHeader(id="header")
        yield Tabs(self.NAME, id="tabs")
        yield Notice(id="notice")
        with Container(id="body"):
            yield from self.body()
        yield Search(id="search")
        yield KeyBar(id="keys")

    def body(self) -> Iterable[Widget]:
        raise NotImplementedError

    def finds(self) -> Table | Pages:
        """What has the focus at first, `/` searches and `y` copies from: the first table."""
        return self.query(Table).first()

    # Textual itself calls the `on_…` of every class that has one: a subclass has its own and never calls this one
    def on_mount(self) -> None:
        self.set_focus(self.finds())
        self.set_interval(TICK_S, self.tick)

    def on_screen_resume(self) -> None:
        self.show(self.app.snapshot)

    def show(self, snapshot: Snapshot) -> None:
        """News of the run. Called while the screen is in front, and when it comes to the front."""
        self._told_at = time.monotonic()
        for panel in self.query(Panel):
            panel.show(snapshot)

    def tick(self) -> None:
        """Timers go on while no news come."""
        if self.is_current and time.monotonic() - self._told_at > 1.5 * TICK_S:
            for panel in self.query(Panel):
                if panel.TICKS:
                    panel.tick()

    # questions

    def load(self, question: Question, then: Callable[[Any], None], *, group: str = "load") -> None:
        """Ask `question` in a thread and give the answer to `then` here; of several in a `group` only the last counts.
        What cannot be answered goes to `problem`."""

        def work() -> None:
            try:
                answer = self.app.source.ask(question)
            except AgliteError as error:
                self.app.call_from_thread(self._settle, worker, self.problem, error)
            else:
                self.app.call_from_thread(self._settle, worker, then, answer)

        worker = self.run_worker(work, thread=True, group=group, exclusive=True, exit_on_error=False)

    def _settle(self, worker: Any, then: Callable[[Any], None], answer: Any) -> None:
        if self.is_mounted and not worker.is_cancelled:
            then(answer)

    def problem(self, error: AgliteError) -> None:
        """A question could not be answered."""
        self.app.notify(error.message, severity="warning", markup=False)

    # keys

    def action_find(self) -> None:
        self._searched = self.finds()
        self.query_one(Search).open()

    def action_find_next(self, by: int) -> None:
        found = self.finds()
        if isinstance(found, Pages):
            found.find_next(by)

    def on_search_changed(self, message: Search.Changed) -> None:
        message.stop()
        if self._searched is not None:
            self._searched.find(message.text)

    def on_search_closed(self, message: Search.Closed) -> None:
        message.stop()
        self.set_focus(self._searched)

    def action_copy(self) -> None:
        text = self.finds().copied()
        if text:
            self.app.copy_to_clipboard(text)
            first = text.strip().partition("\n")[0]
            self.app.notify(first if len(first) < 60 else first[:59] + "…", title="copied", markup=False)
