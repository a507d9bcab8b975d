"""The keys of the terminal UI, once: bindings, footer and help are made of this table."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Key:
    """`keys` as Textual names them, comma-separated; `short` for the footer ('' leaves it out), `long` for the help."""

    keys: str
    action: str
    short: str
    long: str
    shown: str = ""
    """How the key is written; by default as Textual writes it."""

    def binding(self) -> Binding:
        return Binding(
            self.keys, self.action, self.short or self.long, show=bool(self.short), key_display=self.shown or None
        )


APP = (
    Key("p", "pause", "pause", "hold everything: no request is answered, no rollout starts"),
    Key("r", "resume", "resume", "let a paused run go on"),
    Key("d", "detach", "detach", "leave; the run goes on"),
    Key("q", "quit", "quit", "leave, or stop the run (asks)"),
    Key("t", "toggle_theme", "", "light or dark"),
    Key("question_mark,f1", "show_help", "help", "this page", "?"),
)

RUN = (
    Key("enter", "open", "open", "the rollout under the cursor in full", "⏎"),
    Key("f", "follow", "follow", "cursor stays at the top, on what runs"),
    Key("up,k", "cursor(-1)", "", "up", "↑ k"),
    Key("down,j", "cursor(1)", "", "down", "↓ j"),
    Key("pageup,ctrl+b", "page(-1)", "", "a page up", "PgUp"),
    Key("pagedown,ctrl+f", "page(1)", "", "a page down", "PgDn"),
    Key("home,g", "edge(-1)", "", "to the top", "Home g"),
    Key("end,G", "edge(1)", "", "to the bottom", "End G"),
)

ROLLOUT = (
    Key("escape,backspace,left", "back", "back", "back to the run", "esc"),
    Key("down,j", "scroll(1)", "", "down", "↓ j"),
    Key("up,k", "scroll(-1)", "", "up", "↑ k"),
    Key("pagedown,space", "scroll_page(1)", "", "a page down", "PgDn"),
    Key("pageup", "scroll_page(-1)", "", "a page up", "PgUp"),
    Key("tab", "app.focus_next", "", "to the next pane", "Tab"),
)

HELP = (("Everywhere", APP), ("On the run", RUN), ("In a rollout", ROLLOUT))


def bindings(table: tuple[Key, ...]) -> list[Binding]:
    return [key.binding() for key in table]
