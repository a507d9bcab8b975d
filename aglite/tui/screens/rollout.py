"""One rollout in full: what it is worth and why, its calls, what was said, what the agent printed."""

from __future__ import annotations

import threading
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static

from aglite import units
from aglite.conversation import added_messages, message_text, whole_list
from aglite.errors import AgliteError
from aglite.tui.keys import ROLLOUT, bindings
from aglite.tui.widgets.panel import faint, gauge
from aglite.tui.widgets.queue import MARKS

REFRESH_S = 2.0
ROLES = {"system": "$faint", "user": "$primary", "assistant": "$success", "tool": "$secondary", "developer": "$faint"}


class RolloutScreen(Screen[None]):
    BINDINGS = bindings(ROLLOUT)

    def __init__(self, rollout_id: str) -> None:
        super().__init__()
        self.rollout_id = rollout_id
        self._detail: dict[str, Any] | None = None
        self._asking = threading.Lock()

    def compose(self) -> ComposeResult:
        yield Static(faint(f" rollout {self.rollout_id} …"), id="facts")
        with Container(id="panes"):
            with VerticalScroll(id="talk") as talk:
                talk.border_title = "calls"
                yield Static(id="calls")
            with VerticalScroll(id="output") as output:
                output.border_title = "agent's output"
                yield Static(id="log")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#talk").focus()
        self._ask()
        self.set_interval(REFRESH_S, self._ask)

    def _ask(self) -> None:
        done = self._detail is not None and self._detail["state"] not in units.UNFINISHED
        if not done and self._asking.acquire(blocking=False):
            self.run_worker(self._fetch, thread=True, exit_on_error=False)

    def _fetch(self) -> None:
        try:
            detail = units.plain_json(self.app.rollout(self.rollout_id))  # type: ignore[attr-defined]
        except AgliteError as error:
            self.app.call_from_thread(self._problem, error)
        else:
            self.app.call_from_thread(self._show, detail)
        finally:
            self._asking.release()

    def _problem(self, error: AgliteError) -> None:
        if self._detail is None:
            self.query_one("#facts", Static).update(Content.styled(f" {error.message}", "$warning"))

    def _show(self, detail: dict[str, Any]) -> None:
        self._detail = detail
        now = self.app.clock()  # type: ignore[attr-defined]
        self.query_one("#facts", Static).update(facts(detail, now))
        self.query_one("#calls", Static).update(talk(detail))
        self.query_one("#log", Static).update(Content((detail["log_tail"] or "").rstrip() or "nothing printed"))
        self.query_one("#talk").border_title = f"calls {len(detail['call_rows'])}"
        output = self.query_one("#output")
        if detail["state"] in units.UNFINISHED:
            output.scroll_end(animate=False)

    def action_back(self) -> None:
        self.app.pop_screen()

    def action_scroll(self, by: int) -> None:
        self._pane.scroll_relative(y=by, animate=False)

    def action_scroll_page(self, by: int) -> None:
        self._pane.scroll_relative(y=by * max(self._pane.size.height - 1, 1), animate=False)

    @property
    def _pane(self) -> VerticalScroll:
        focused = self.focused
        return focused if isinstance(focused, VerticalScroll) else self.query_one("#talk", VerticalScroll)


def facts(detail: dict[str, Any], now: float) -> Content:
    """State and cause, reward with its parts, tokens, times."""
    mark, style = MARKS[detail["state"]]
    cause = f" ({detail['cause']})" if detail["cause"] else ""
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
        faint(
            f" {units.count(detail['prompt_tokens'])} prompt, {units.count(detail['sampled_tokens'])} sampled, "
            f"{units.count(detail['trained_tokens'])} trained tokens   samples {detail['samples']}   "
            f"policy {units.versions(detail) or '–'}"
            + (f"   flags {', '.join(detail['flags'])}" if detail["flags"] else "")
        ),
    ]
    return Content("\n").join(lines)


def _part(name: str, value: float) -> list[Any]:
    return ["   ", (f"{name} ", "$faint"), gauge(value, 6, "$accent") if 0 <= value <= 1 else "", f" {value:.2f}"]


def _ran(detail: dict[str, Any], now: float) -> str:
    if not detail["started_at"]:
        return f"waiting for {units.clock(now - detail['created_at'])}"
    if not detail["finished_at"]:
        return f"running for {units.clock(now - detail['started_at'])}"
    return f"ran {units.clock(detail['finished_at'] - detail['started_at'])}"


def talk(detail: dict[str, Any]) -> Content:
    """Each call: how it follows from the earlier ones, its numbers, and the messages that it adds."""
    calls = detail["call_rows"]
    if not calls:
        return faint("the agent has not called the model yet")
    numbers = {call["id"]: number for number, call in enumerate(calls, 1)}
    blocks = []
    for number, (call, added) in enumerate(
        zip(calls, added_messages([whole_list(call) for call in calls]), strict=True), 1
    ):
        blocks.append(_call(number, call, numbers))
        for message in added:
            role = message.get("role", "?")
            blocks.append(
                Content.assemble((f"{role} ", f"bold {ROLES.get(role, '$foreground')}"), message_text(message))
            )
        blocks.append(Content(""))
    return Content("\n").join(blocks[:-1])


def _call(number: int, call: dict[str, Any], numbers: dict[int, int]) -> Content:
    if call["fork_cause"]:
        how = ("forks: " if number > 1 else "") + call["fork_cause"]
    else:
        how = f"continues {numbers.get(call['parent_id'], call['parent_id'])}"
    took = f"{call['finished_at'] - call['started_at']:.1f} s" if call["finished_at"] else "…"
    held = f", held {call['held_s']:.0f} s" if call["held_s"] >= 1 else ""
    end = call["finish_reason"] if call["status"] == "ok" else f"{call['status']} {call['error']}".strip()
    versions = " ".join(f"v{version}" for version, _ in call["versions"])
    return Content.assemble(
        (f"── call {number} ", "bold $primary"),
        (how, "$accent" if call["fork_cause"] and number > 1 else "$faint"),
        (f" · {call['prompt_tokens']} → {call['sampled_tokens']} tokens · {versions} · {took}{held} · {end}", "$faint"),
    )
