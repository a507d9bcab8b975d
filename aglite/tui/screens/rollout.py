"""One rollout in full: its calls in time, what was said, its tokens, what the agent printed, what it is worth and
why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

from textual import events
from textual.containers import Container
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from aglite import units
from aglite.errors import AgliteError
from aglite.tui.keys import ROLLOUT, ROLLOUTS, bindings
from aglite.tui.screens.view import View
from aglite.tui.steer import RolloutActions
from aglite.tui.widgets.pages import Pages, wrapped
from aglite.tui.widgets.panel import faint, gauge
from aglite.tui.widgets.queue import MARKS
from aglite.tui.widgets.talk import Talk
from aglite.tui.widgets.tokens import MODES, Tokens
from aglite.tui.widgets.turns import TurnTable
from aglite.tui.widgets.verdict import verdict

REFRESH_S = 2.0
PAGES = ("messages", "tokens", "output", "reward")


class PageNames(Static):
    """The names of the pages; a click opens one."""

    def on_click(self, event: events.Click) -> None:
        at = 1
        for name in PAGES:
            at += len(name) + 4
            if event.x < at:
                cast(RolloutScreen, self.screen).turn_to(name)
                return


class RolloutScreen(RolloutActions, View):
    NAME: ClassVar = "rollouts"
    BINDINGS = bindings(ROLLOUT, ROLLOUTS)

    def __init__(self, rollout_id: str, beside: Sequence[str] = (), *, page: str = "messages") -> None:
        """`beside`: the ids of the list it was opened from."""
        super().__init__()
        self.rollout_id = rollout_id
        self._beside = list(beside)
        self._page = page
        self._detail: dict[str, Any] | None = None
        self._tokens: list[dict[str, Any]] | None = None
        self._mode = MODES[0]
        self._talk: Talk | None = None

    def body(self) -> Iterable[Widget]:
        yield Static(faint(f" rollout {self.rollout_id} …"), id="facts")
        with Container(id="panes"):
            yield TurnTable(id="turns")
            with Container(id="reading"):
                yield PageNames(id="page-names")
                yield Pages(id="page")

    def on_mount(self) -> None:
        self._name_pages()
        self._ask()
        self.set_interval(REFRESH_S, self._ask)

    def finds(self) -> Pages:
        return self.query_one(Pages)

    def chosen(self) -> dict[str, Any] | None:
        return self._detail

    # what there is to read

    def _ask(self) -> None:
        done = self._detail is not None and self._detail["state"] not in units.UNFINISHED
        if self.is_current and not done:
            wanted = self.rollout_id
            self.load(lambda run: units.plain_json(run.rollout(wanted)), self._tell)

    def problem(self, error: AgliteError) -> None:
        if self._detail is None:
            self.query_one("#facts", Static).update(Content.styled(f" {error.message}", "$warning"))
            self.query_one(TurnTable).show([], 0.0, error.mend or "nothing to see")

    def _tell(self, detail: dict[str, Any]) -> None:
        if detail["id"] != self.rollout_id:
            return
        again = self._detail is not None
        if again and len(detail["call_rows"]) != len((self._detail or {})["call_rows"]):
            self._tokens = None
        self._detail, self._talk = detail, Talk(detail)
        now = self.app.clock()
        self.query_one("#facts", Static).update(facts(detail, now, self.size.width))
        self.query_one(TurnTable).tell(detail, now)
        self._read(keep=again)
        self.refresh_bindings()

    def _read(self, *, keep: bool = False) -> None:
        """Show the page that is open."""
        self._name_pages()
        page, detail = self.query_one(Pages), self._detail
        if detail is None or self._talk is None:
            page.read(wrapped([faint(" reading …")]))
        elif self._page == "messages":
            page.read(self._talk.layout, keep=keep)
        elif self._page == "output":
            printed = (detail["log_tail"] or "").rstrip()
            page.read(wrapped([Content(printed) if printed else faint(" the agent printed nothing")]), keep=keep)
            if not keep:
                page.scroll_end(animate=False)
        elif self._page == "reward":
            page.read(lambda width: verdict(detail, width), keep=keep)
        elif self._tokens is None:
            page.read(wrapped([faint(" reading …")]))
            wanted = self.rollout_id
            self.load(lambda run: (wanted, run.tokens(wanted)), self._tell_tokens, group="tokens")
        else:
            numbers = {call["id"]: number for number, call in enumerate(detail["call_rows"], 1)}
            page.read(Tokens(self._tokens, numbers, self._mode).layout, keep=keep)

    def _tell_tokens(self, answer: tuple[str, list[dict[str, Any]]]) -> None:
        rollout_id, tokens = answer
        if rollout_id == self.rollout_id:
            self._tokens = tokens
            if self._page == "tokens":
                self._read()

    def _name_pages(self) -> None:
        parts: list[Any] = [" "]
        for name in PAGES:
            here = name == self._page
            parts += [(f" {name} ", "bold $cursor-text on $cursor" if here else "$faint"), "  "]
        self.query_one(PageNames).update(Content.assemble(*parts))

    def turn_to(self, page: str) -> None:
        self._page = page
        self._read()

    # keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "colours":
            return self._page == "tokens"
        return super().check_action(action, parameters)

    def action_back(self) -> None:
        self.app.pop_screen()

    def action_page_by(self, by: int) -> None:
        self.turn_to(PAGES[(PAGES.index(self._page) + by) % len(PAGES)])
        self.refresh_bindings()

    def action_colours(self) -> None:
        self._mode = MODES[(MODES.index(self._mode) + 1) % len(MODES)]
        self._read(keep=True)

    def action_scroll_page(self, by: int) -> None:
        page = self.query_one(Pages)
        page.scroll_relative(y=by * max(page.size.height - 1, 1), animate=False)

    def action_turn(self, by: int) -> None:
        table = self.query_one(TurnTable)
        table.move(table.cursor + by)

    def on_table_moved(self, message: TurnTable.Moved) -> None:
        if self._page == "messages" and message.row is not None and self._talk is not None and self._talk.anchors:
            self.query_one(Pages).go(self._talk.anchors[message.row["number"] - 1])

    def on_turn_table_chosen(self, message: TurnTable.Chosen) -> None:
        self.turn_to("messages")
        if self._talk is not None and self._talk.anchors:
            self.query_one(Pages).go(self._talk.anchors[message.row["number"] - 1])

    def action_neighbour(self, by: int) -> None:
        if self.rollout_id in self._beside:
            at = self._beside.index(self.rollout_id) + by
            if 0 <= at < len(self._beside):
                self.rollout_id = self._beside[at]
                self._detail = self._tokens = self._talk = None
                self.query_one(TurnTable).show([], 0.0, "reading …")
                self._read()
                self._ask()


def facts(detail: dict[str, Any], now: float, width: int) -> Content:
    """State and cause, reward with its parts, tokens, times."""
    mark, style = MARKS[detail["state"]]
    cause = f" ({detail['cause']})" if detail["cause"] else ""
    flags = f"   ▲ {', '.join(detail['flags'])}" if detail["flags"] else ""
    lines = [
        Content.assemble(
            (f" {detail['id']}", "bold"),
            (f"   task {detail['task_id']}   {detail['split']}   group {detail['group'] or '–'}", "$faint"),
        ),
        Content.assemble(
            (f" {mark} {detail['state']}{cause}", style),
            (f"   attempt {detail['attempt']} on {detail['backend']}   ", "$faint"),
            _ran(detail, now),
        ),
        Content.assemble(
            (" reward ", "$faint"),
            (units.reward(detail["reward"]), "bold"),
            *[part for name, value in detail["breakdown"].items() for part in _part(name, value)],
        ),
        Content.assemble(
            (
                f" {units.count(detail['prompt_tokens'])} prompt, {units.count(detail['sampled_tokens'])} sampled, "
                f"{units.count(detail['trained_tokens'])} trained tokens   samples {detail['samples']}   "
                f"policy {units.versions(detail) or '–'}",
                "$faint",
            ),
            (flags, "$warning"),
        ),
    ]
    return Content("\n").join([line.truncate(width, ellipsis=True) for line in lines])


def _part(name: str, value: float) -> list[Any]:
    return ["   ", (f"{name} ", "$faint"), gauge(value, 6, "$accent") if 0 <= value <= 1 else "", f" {value:.2f}"]


def _ran(detail: dict[str, Any], now: float) -> str:
    if not detail["started_at"]:
        return "never ran" if detail["finished_at"] else f"waiting for {units.clock(now - detail['created_at'])}"
    if not detail["finished_at"]:
        return f"running for {units.clock(now - detail['started_at'])}"
    return f"ran {units.clock(detail['finished_at'] - detail['started_at'])}"
