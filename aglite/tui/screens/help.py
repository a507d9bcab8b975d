"""The keys and the words on the screen."""

from __future__ import annotations

from textwrap import wrap
from typing import ClassVar

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
    ("policy", "versions of the weights that sampled it; +1 per update"),
    ("gate", "closed during an update: requests are held, agents just wait"),
    ("failed / error", "the agent's own failure (scored) / the infrastructure's (tried again, never scored)"),
)


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar = [Binding("escape,q,question_mark,f1,enter", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="dialog"):
            for title, keys in HELP:
                yield Static(_section(title, [(key.shown or key.keys.split(",")[0], key.long) for key in keys]))
            yield Static(_section("Words", list(WORDS)))


def _section(title: str, rows: list[tuple[str, str]]) -> Content:
    lines = [Content.styled(title, "bold $primary")]
    for name, text in rows:
        first, *rest = wrap(text, 52)
        lines.append(Content.assemble((f"  {name:<16}", "bold"), first))
        lines.extend(Content(" " * 18 + more) for more in rest)
    return Content("\n").join([*lines, Content("")])
