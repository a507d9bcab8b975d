"""The keys and the words on the screen."""

from __future__ import annotations

from textwrap import wrap
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from aglite.tui.keys import HELP

WORDS = (
    ("rollout", "one execution of the agent on a task; rollouts of one task form a group and share a baseline"),
    ("calls", "model requests the agent made"),
    ("smpl", "token sequences that the trainer saw; more than one when the conversation forked"),
    ("flat", "groups whose rewards are all equal: they teach nothing"),
    ("stale", "policy versions between the one that sampled a token and the one that is trained"),
    ("mismatch", "difference of log-probabilities between engine and trainer, which should be none"),
    ("policy", "versions of the weights that sampled it; +1 per update"),
    ("gate", "closed during an update: requests are held, agents just wait"),
    ("failed / error", "the agent's own failure (scored) / the infrastructure's (tried again, never scored)"),
)

WIDTH = 86
"""Of the dialog at the most, in columns."""
AROUND = 7
"""Columns of it that are no text: frame, padding, scroll bar."""
INDENT = 18


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar = [Binding("escape,q,question_mark,f1,enter", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="dialog"):
            yield Static(id="help-text")

    def on_resize(self, event: events.Resize) -> None:
        sections = [(title, [(key.written, key.long) for key in keys]) for title, keys in HELP]
        room = min(event.size.width, WIDTH) - AROUND - INDENT
        text = [_section(title, rows, max(room, 10)) for title, rows in (*sections, ("Words", list(WORDS)))]
        self.query_one("#help-text", Static).update(Content("\n").join(text))


def _section(title: str, rows: list[tuple[str, str]], room: int) -> Content:
    lines = [Content.styled(title, "bold $primary")]
    for name, text in rows:
        first, *rest = wrap(text, room)
        lines.append(Content.assemble((f"  {name:<{INDENT - 2}}", "bold"), first))
        lines.extend(Content(" " * INDENT + more) for more in rest)
    return Content("\n").join([*lines, Content("")])
