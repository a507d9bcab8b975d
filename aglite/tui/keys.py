"""The keys of the terminal UI, once: bindings, the line at the bottom, the command palette and the help are made of
this table."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Key:
    """`keys` as Textual names them, comma-separated; `short` for the line at the bottom ('' leaves it out), `long` for
    palette and help."""

    keys: str
    action: str
    short: str
    long: str
    shown: str = ""
    """How the key is written; by default its own name."""
    steers: bool = False
    """Whether it changes the run, so that one who only looks does not have it."""

    @property
    def written(self) -> str:
        return self.shown or self.keys.split(",")[0]

    def binding(self) -> Binding:
        return Binding(self.keys, self.action, self.short or self.long, show=bool(self.short), key_display=self.written)


SCREENS = ("run", "rollouts", "steps", "sandboxes", "events", "recipe")
"""The screens, in the order of their number keys."""

GO = tuple(Key(str(n), f"go('{name}')", "", f"screen: {name}") for n, name in enumerate(SCREENS, 1))

STEER = (
    Key("p", "pause", "pause", "hold everything: no request is answered, no rollout starts", steers=True),
    Key("r", "resume", "resume", "let a paused run go on", steers=True),
    Key("P", "preempt", "preempt", "end a drain: what is being sampled stops at its next token", steers=True),
    Key("c", "concurrency", "", "change how many rollouts run at once", steers=True),
    Key("w", "checkpoint", "", "write a checkpoint before the next step", steers=True),
    Key("e", "evaluate", "", "evaluate the policy in force before the next step", steers=True),
    Key("s", "stop_after_step", "", "stop when the next step is trained (asks)", steers=True),
)

APP = (
    Key("colon,ctrl+p", "command_palette", "commands", "everything that can be done, by name", ":"),
    Key("d", "detach", "detach", "leave; the run goes on"),
    Key("q", "quit", "quit", "leave, or stop the run (asks)"),
    Key("question_mark,f1", "show_help", "help", "the keys and the words on the screen", "?"),
    Key("t", "toggle_theme", "", "light or dark"),
)

FIND = (
    Key("slash", "find", "find", "search; in a table: show only what matches", "/"),
    Key("n", "find_next(1)", "", "next match in a text"),
    Key("N", "find_next(-1)", "", "previous match in a text"),
    Key("y", "copy", "", "copy what the cursor is on to the clipboard"),
)

TABLE = (
    Key("enter", "open", "open", "what is under the cursor in full", "⏎"),
    Key("f", "follow", "", "cursor stays on the newest"),
    Key("o", "sort(1)", "", "sort by the next column, then as it was"),
    Key("O", "reverse", "", "sort the other way round"),
    Key("up,k", "cursor(-1)", "", "up", "↑ k"),
    Key("down,j", "cursor(1)", "", "down", "↓ j"),
    Key("pageup,ctrl+b", "page(-1)", "", "a page up", "PgUp"),
    Key("pagedown,ctrl+f", "page(1)", "", "a page down", "PgDn"),
    Key("home,g", "edge(-1)", "", "to the top", "Home g"),
    Key("end,G", "edge(1)", "", "to the bottom", "End G"),
)

ROLLOUTS = (
    Key("x", "kill", "kill", "end the rollout (asks)", steers=True),
    Key("a", "retry", "again", "launch a rollout that did not end well again", steers=True),
    Key("z", "quarantine", "", "leave the rollout out of the training (asks)", steers=True),
    Key("Z", "quarantine_task", "", "leave its task out of the run, or take it again (asks)", steers=True),
)

SANDBOXES = (
    Key("x", "kill", "kill", "end the rollout in it (asks)", steers=True),
    Key("l", "logs", "log", "what the agent printed so far"),
    Key("S", "shell", "shell", "a shell where the agent is; leave it with exit", steers=True),
)

EVENTS = (Key("v", "level", "level", "all events, from warnings up, or errors only"),)
RECIPE = (Key("v", "differences", "only differences", "only what differs from the defaults, or everything"),)

ROLLOUT = (
    Key("escape,backspace", "back", "back", "back to where you came from", "esc"),
    Key("tab,right,l", "page_by(1)", "next page", "messages, tokens, output, reward", "Tab"),
    Key("shift+tab,left,h", "page_by(-1)", "", "the page before", "⇧Tab"),
    Key("v", "colours", "colours", "colour the tokens by mask, log-probability or policy version"),
    Key("pagedown,space", "scroll_page(1)", "", "scroll a page down", "PgDn"),
    Key("pageup", "scroll_page(-1)", "", "scroll a page up", "PgUp"),
    Key("down,j", "turn(1)", "", "the next call", "↓ j"),
    Key("up,k", "turn(-1)", "", "the call before", "↑ k"),
    Key("right_square_bracket", "neighbour(1)", "", "the next rollout of the list", "]"),
    Key("left_square_bracket", "neighbour(-1)", "", "the rollout before it", "["),
)

HELP = (
    ("Screens", GO),
    ("Everywhere", (*APP, *FIND)),
    ("The run", STEER),
    ("In a table", TABLE),
    ("On a rollout", ROLLOUTS),
    ("In a rollout", ROLLOUT),
    ("On a sandbox", SANDBOXES),
    ("Among events, in the recipe", (*EVENTS, *RECIPE)),
)


def bindings(*tables: tuple[Key, ...]) -> list[Binding]:
    return [key.binding() for table in tables for key in table]
