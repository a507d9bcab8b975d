"""The line in which one types what to find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input, Static

from aglite.tui.widgets.line import Line


class Search(Horizontal):
    """Hidden until `open`. Says with every character what is there; escape clears it, enter keeps it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "clear", show=False)]

    @dataclass
    class Changed(Message):
        text: str

    @dataclass
    class Closed(Message):
        pass

    def compose(self) -> ComposeResult:
        yield Static("/", id="slash")
        yield Line(placeholder="words, or a column: state:failed reward<0.5", id="sought", select_on_focus=False)

    def on_mount(self) -> None:
        self.display = False

    def open(self) -> None:
        self.display = True
        self.screen.set_focus(self.query_one(Line))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Changed(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close()

    def action_clear(self) -> None:
        self.query_one(Line).value = ""
        self._close()

    def _close(self) -> None:
        self.display = False
        self.post_message(self.Closed())
