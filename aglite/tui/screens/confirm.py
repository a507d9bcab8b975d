"""Questions before what cannot be taken back, and for a number."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.validation import Integer
from textual.widgets import Button, Input, Static

from aglite.tui.widgets.line import Line


class Confirm(ModalScreen[bool]):
    """True when the person is sure. The safe answer has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("escape,n,q", "answer(False)", "no"),
        Binding("left", "app.focus_previous", "", show=False),
        Binding("right", "app.focus_next", "", show=False),
    ]

    def __init__(self, title: str, text: str, verb: str) -> None:
        super().__init__()
        self._title, self._text, self._verb = title, text, verb

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog ask"):
            yield Static(Content.styled(self._title, "bold"))
            yield Static(Content(self._text), classes="said")
            with Horizontal(classes="buttons"):
                yield Button("[u]N[/u]o", id="no")
                yield Button(f"[u]Y[/u]es: {self._verb.lower()}", variant="error", id="yes")

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#no"))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, sure: bool) -> None:
        self.dismiss(sure)


class AskNumber(ModalScreen[int | None]):
    """A whole number from `low` to `high`, or None when the person would rather not."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, title: str, text: str, value: int, *, low: int, high: int) -> None:
        super().__init__()
        self._title, self._text, self._value, self._low, self._high = title, text, value, low, high

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog ask"):
            yield Static(Content.styled(self._title, "bold"))
            yield Static(Content(self._text), classes="said")
            yield Line(str(self._value), type="integer", validators=[Integer(self._low, self._high)], id="number")
            yield Static(Content.styled(f"{self._low} to {self._high}; enter takes it, escape leaves it", "$faint"))

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Line))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.validation_result and event.validation_result.is_valid:
            self.dismiss(int(event.value))
