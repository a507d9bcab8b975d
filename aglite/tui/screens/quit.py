"""Asked on leaving while the run goes on: leave it running, or stop it."""

from __future__ import annotations

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

Wish = Literal["leave", "stop"]


class QuitScreen(ModalScreen[Wish | None]):
    BINDINGS: ClassVar = [
        ("l", "choose('leave')", "leave it running"),
        ("s", "choose('stop')", "stop it"),
        ("escape,c,q", "choose('')", "cancel"),
        ("left", "app.focus_previous", ""),
        ("right", "app.focus_next", ""),
    ]

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def compose(self) -> ComposeResult:
        with Vertical(id="quit", classes="dialog"):
            yield Static(
                f"[b]Leave aglite?[/b]\n\n{self._run} goes on unless you stop it. Stopping writes a checkpoint."
            )
            with Horizontal(classes="buttons"):
                yield Button("[u]L[/u]eave it running", variant="primary", id="leave")
                yield Button("[u]S[/u]top the run", variant="error", id="stop")
                yield Button("[u]C[/u]ancel", id="cancel")

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#leave"))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_choose("" if event.button.id == "cancel" else event.button.id or "")

    def action_choose(self, wish: str) -> None:
        self.dismiss(wish or None)  # type: ignore[arg-type]
