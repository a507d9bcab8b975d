"""What can be done from the terminal UI: asked for by keys and mouse, and what reaches the supervisor."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fake_daemon import FakeDaemon, event, leaked
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color, ColorSystem
from textual.pilot import Pilot
from textual.widgets import Input
from tui_pilot import heard, make_app, settled, until

from aglite.rollouts.causes import CAUSES
from aglite.rollouts.why import why
from aglite.tui.filter import matcher
from aglite.tui.screens.confirm import Confirm
from aglite.tui.screens.events import EventsScreen
from aglite.tui.screens.rollout import RolloutScreen
from aglite.tui.screens.step_rollouts import StepRollouts
from aglite.tui.themes import PLAIN
from aglite.tui.widgets.events import EventTable
from aglite.tui.widgets.pages import Pages
from aglite.tui.widgets.table import Table
from aglite.tui.widgets.timeline import slots
from aglite.tui.widgets.turns import bar


def table(pilot: Pilot[Any]) -> Table:
    return pilot.app.screen.query(Table).first()


async def press(pilot: Pilot[Any], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settled(pilot)


async def posted(pilot: Pilot[Any], daemon: FakeDaemon, number: int = 1) -> list[tuple[str, dict[str, Any]]]:
    await until(pilot, lambda: len(daemon.posted) == number, f"{number} wishes have arrived")
    return daemon.posted


async def test_ending_a_rollout_asks_first(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "2", "down", "x", "n")
        await press(pilot, "x", "enter")  # the safe answer has the focus
        assert daemon.posted == [] and not isinstance(app.screen, Confirm)
        chosen = table(pilot).selected["id"]
        await press(pilot, "x", "y")
        assert await posted(pilot, daemon) == [(f"rollouts/{chosen}/kill", {})]


async def test_what_makes_no_sense_for_a_rollout_is_not_offered(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "2")
        rows = table(pilot).rows
        for state, kill, again in (("running", True, False), ("done", False, False), ("failed", False, True)):
            table(pilot).move(next(at for at, row in enumerate(rows) if row["state"] == state))
            found = pilot.app.screen.active_bindings
            assert ("x" in found, "a" in found) == (kill, again), state
        chosen = table(pilot).selected["id"]
        await press(pilot, "a")
        assert await posted(pilot, daemon) == [(f"rollouts/{chosen}/retry", {})]


async def test_a_task_is_quarantined_and_taken_again(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "2", "Z", "y")
        task = table(pilot).selected["task_id"]
        await until(pilot, lambda: app.snapshot.status["quarantined"] == [task], "it is known")
        await press(pilot, "Z", "z", "y")
        chosen = table(pilot).selected["id"]
        wishes = [what for what, _ in await posted(pilot, daemon, 3)]
        assert wishes == [f"tasks/{task}/quarantine", f"tasks/{task}/release", f"rollouts/{chosen}/quarantine"]


async def test_the_run_is_steered(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        assert not app.check_action("preempt", ())
        await press(pilot, "w", "e", "s", "y", "c")
        app.screen.query_one(Input).value = "0"
        await press(pilot, "enter")  # out of range: it stays open
        app.screen.query_one(Input).value = "5"
        await press(pilot, "enter")
        wishes = await posted(pilot, daemon, 4)
        await until(pilot, lambda: app.snapshot.status["concurrency"] == 5, "it is known")
        daemon.scene["status"]["phase"] = "draining"
        app.feed.hurry()
        await until(pilot, lambda: app.check_action("preempt", ()), "it is offered")
        await press(pilot, "P")
        wishes = await posted(pilot, daemon, 5)
    assert wishes == [
        ("checkpoint", {}),
        ("evaluate", {}),
        ("stop", {"after_step": True}),
        ("concurrency", {"rollouts": 5}),
        ("preempt", {}),
    ]


async def test_who_only_looks_changes_nothing(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir, readonly=True)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "2", "down", *"prPcwesxazZ", "y", "4", "x", "y", "S")
        assert daemon.posted == [] and not isinstance(app.screen, Confirm)
        await press(pilot, "2", "enter", *"xaz", "escape", "q")
        await until(pilot, lambda: app.return_value is not None, "it has left without a question")
    assert app.return_value == "leave" and daemon.posted == []


async def test_what_outlived_its_rollout_can_be_ended(daemon: FakeDaemon) -> None:
    daemon.scene["sandboxes"].append(leaked("r-0badc0ffee"))
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "4")
        assert table(pilot).rows[0]["leaked"]
        await press(pilot, "x", "y")
        assert await posted(pilot, daemon) == [("rollouts/r-0badc0ffee/kill", {})]


async def test_a_shell_is_opened_beside_an_agent_that_runs(daemon: FakeDaemon, monkeypatch: Any) -> None:
    opened: list[list[str]] = []

    def run(words: list[str], **_: Any) -> Any:
        opened.append(words[1:])
        return SimpleNamespace(returncode=3)

    app = make_app(daemon.run_dir)
    monkeypatch.setattr("aglite.tui.screens.sandboxes.subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(app, "suspend", nullcontext)
    daemon.scene["sandboxes"] = [row for row in daemon.scene["sandboxes"] if row["state"] == "running"][:1]
    daemon.scene["sandboxes"].append(leaked("r-0badc0ffee"))
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "4", "S")
        assert opened == [], "what an agent left is none"
        await press(pilot, "down", "S")
        row = table(pilot).rows[1]
        assert opened == [["-m", "aglite", "shell", row["id"], "--dir", str(daemon.run_dir.path)]]
        assert "code 3" in [notice.message for notice in app._notifications][-1]


async def test_filter_sort_and_copy(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(120, 40)) as pilot:
        await heard()(pilot)
        await press(pilot, "2", "slash", *"state:failed lantern")
        found = table(pilot)
        assert found.rows and all(row["state"] == "failed" and "lantern" in row["task_id"] for row in found.rows)
        await press(pilot, "escape")
        assert len(found.rows) == 172 and found.has_focus
        while found.sorted_by is None or found.sorted_by.name != "reward":
            await press(pilot, "o")
        rewards = [row["reward"] for row in found.rows]
        known = [reward for reward in rewards if reward is not None]
        assert rewards == sorted(known, reverse=True) + [None] * (172 - len(known))
        await press(pilot, "O")
        assert [row["reward"] for row in found.rows if row["reward"] is not None] == sorted(known)
        await press(pilot, "y")
        assert found.selected["id"][:8] in app.clipboard


async def test_the_mouse_goes_everywhere(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await pilot.click("#tabs", offset=(15, 0))
        await settled(pilot)
        assert app.screen.query_one("#all-rollouts")
        head = table(pilot)
        await pilot.click("#all-rollouts", offset=(12, 1))  # the name of a column
        await settled(pilot)
        assert head.sorted_by is not None and head.sorted_by.name == "task"
        await pilot.click("#all-rollouts", offset=(12, 5), times=2)
        await until(pilot, lambda: isinstance(app.screen, RolloutScreen), "it is open")
        await settled(pilot)
        await pilot.click("#page-names", offset=(16, 0))
        await settled(pilot)
        assert app.screen._page == "tokens"
        await pilot.click("#keys", offset=(2, 0))  # the first key: the next page
        await settled(pilot)
        assert app.screen._page == "output"


async def test_from_a_step_to_its_rollouts_and_their_neighbours(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(120, 40)) as pilot:
        await heard()(pilot)
        await press(pilot, "3", "enter")
        assert isinstance(app.screen, StepRollouts)
        ids = [row["id"] for row in table(pilot).rows]
        await press(pilot, "enter", "right_square_bracket")
        assert isinstance(app.screen, RolloutScreen) and app.screen.rollout_id == ids[1]
        await press(pilot, "left_square_bracket", "left_square_bracket")
        assert app.screen.rollout_id == ids[0]  # there is none before the first
        await press(pilot, "escape", "escape", "1")
        assert app.current_mode == "run"


async def test_events_arrive_while_one_looks(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "5")
        assert isinstance(app.screen, EventsScreen)
        found = app.screen.query_one(EventTable)
        assert [row["id"] for row in found.rows] == list(range(1, 15))
        daemon.scene["events"].append(event(15, 1, "run", "the disk is full", "error"))
        await until(pilot, lambda: len(found.rows) == 15, "it has arrived")
        assert found.selected["id"] == 15  # it follows
        await press(pilot, "v", "v")
        assert [row["id"] for row in found.rows] == [15]


async def test_a_text_is_searched(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "2")
        rows = table(pilot).rows
        table(pilot).move(next(at for at, row in enumerate(rows) if row["calls"] == 2))
        await press(pilot, "enter", "slash", *"LANTERN", "enter")
        page = app.screen.query_one(Pages)
        assert page.border_subtitle == "1 of 4 lines"
        await press(pilot, "n", "N", "N")
        assert page.border_subtitle == "4 of 4 lines"
        await press(pilot, "y")
        assert "The lantern glows softly" in app.clipboard


async def test_questions_that_fail_are_answered_on_the_screen(daemon: FakeDaemon) -> None:
    daemon.refuse["/api/steps"] = (409, {"detail": "the disk is gone", "mend": ""})
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await press(pilot, "3")
        assert table(pilot).empty == "the disk is gone"


def test_a_filter_takes_words_and_conditions() -> None:
    row = {"id": "r-1", "state": "done", "reward": 0.25, "calls": 3, "cause": None}
    cells = {"rollout": "r-1", "task": "write a poem", "state": "✓ done", "calls": "3"}
    for query in (
        "",
        "POEM",
        "write done",
        "state:do",
        "state=done",
        "reward<0.5 calls>=3",
        "calls=3",
        "state!=failed",
    ):
        assert matcher(query)(cells, row), query
    for query in (
        "prose",
        "state:fail",
        "reward>0.25",
        "calls<3",
        "calls!=3",
        "state!=done",
        "cause>1",
        "poem calls>9",
    ):
        assert not matcher(query)(cells, row), query
    assert matcher("http:")({"task": "see http://x"}, {}) and not matcher("none:1")(cells, row)


@given(st.text())
def test_any_filter_is_harmless(query: str) -> None:
    assert matcher(query)({"a": "text"}, {"a": 1}) in (True, False)


def test_the_strip_shows_what_took_most_of_each_part() -> None:
    phases = [
        {"phase": "rollout", "started_at": 0.0, "finished_at": 7.0},
        {"phase": "training", "started_at": 7.0, "finished_at": None},
    ]
    assert slots(phases, 0.0, 10.0, 5) == ["rollout"] * 3 + ["rollout", "training"]
    assert slots(phases, -10.0, 10.0, 4) == ["", "", "rollout", "training"]
    assert slots(phases, 0.0, 0.0, 5) == slots(phases, 0.0, 1.0, 0) == []


def test_a_call_on_its_time() -> None:
    call = {"started_at": 2.0, "held_s": 2.0, "first_token_at": 6.0, "finished_at": 8.0}
    assert bar(call, (0.0, 10.0), 10, now=10.0) == "  ░░▒▒██"
    assert bar({**call, "first_token_at": None, "finished_at": None}, (0.0, 10.0), 10, now=10.0) == "  ░░▒▒▒▒▒▒"


def test_every_cause_is_explained() -> None:
    for code in CAUSES:
        what, mend, whose = why(f"{code}: in particular") or ("", "", "")
        assert what and mend and whose, code
    assert why("something else") is None and why("") is None


def test_16_colours_are_those_of_the_terminal() -> None:
    named = [PLAIN.primary, PLAIN.secondary, PLAIN.accent, PLAIN.success, PLAIN.error, PLAIN.foreground]
    shown = [Color.parse(each).downgrade(ColorSystem.STANDARD).number for each in [*named, PLAIN.background]]
    assert len(set(shown)) == len(shown)  # none is turned into another
    cursor = [Color.parse(PLAIN.variables[name]).downgrade(ColorSystem.STANDARD) for name in ("cursor", "cursor-text")]
    assert cursor[0] != cursor[1] and cursor[0].number != shown[-1]


@pytest.mark.parametrize("screen", ["2", "3", "4", "5", "6"])
@pytest.mark.parametrize("size", [(1, 1), (79, 23)])
async def test_no_size_breaks_a_screen(daemon: FakeDaemon, screen: str, size: tuple[int, int]) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=size) as pilot:
        await heard()(pilot)
        await press(pilot, screen, "down", "enter")
        await press(pilot, *["tab"] * 4)
        lines = app.screen._compositor.render_strips()
        assert {strip.cell_length for strip in lines} == {size[0]}
