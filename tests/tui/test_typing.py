"""Keys that arrive together, as they do over SSH, act in the order in which they were typed."""

from __future__ import annotations

from fake_daemon import FakeDaemon
from textual.timer import Timer
from textual.widgets import Input
from tui_pilot import heard, make_app, typed, until

from aglite.tui.screens.help import HelpScreen
from aglite.tui.screens.rollout import RolloutScreen
from aglite.tui.widgets.events import EventTable


async def test_what_is_typed_behind_a_backspace_stays(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await typed(pilot, "c")
        await typed(pilot, "\x7f4")
        assert app.screen.query_one(Input).value == "4"
        await typed(pilot, "2\x7f\x7f37\x1b[D1\r")
        await until(pilot, lambda: daemon.posted, "it has arrived")
    assert daemon.posted == [("concurrency", {"rollouts": 317})]


async def test_a_question_and_its_answer_in_one_go(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await typed(pilot, "c6\r")
        await until(pilot, lambda: daemon.posted, "it has arrived")
        chosen = app.screen.finds().selected["id"]
        await typed(pilot, "xnxy")
        await until(pilot, lambda: len(daemon.posted) > 1, "it has arrived")
    assert daemon.posted == [("concurrency", {"rollouts": 6}), (f"rollouts/{chosen}/kill", {})]


async def test_a_word_to_search_for_presses_none_of_its_letters(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await typed(pilot, "2/failed")
        table = app.screen.finds()
        assert table.query_text == "failed" and {row["state"] for row in table.rows} == {"failed"}
        assert app.return_value is None and daemon.posted == []  # d would have left, a launched it again


async def test_through_screens_in_one_go(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await typed(pilot, "2j\r\t")
        assert isinstance(app.screen, RolloutScreen) and app.screen._page == "tokens"
        await typed(pilot, "5?")
        assert isinstance(app.screen, HelpScreen) and app.current_mode == "events"
        await typed(pilot, "q3\r1")
        assert app.current_mode == "run" and len(app.screen_stack) == 1


async def test_events_are_searched_where_the_cursor_is_on_them(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(160, 50)) as pilot:
        await heard()(pilot)
        await typed(pilot, "\t/checkpoint\r")
        found = app.screen.query_one("#events", EventTable)
        assert found.query_text == "checkpoint" and 0 < len(found.rows) < len(found.all) and found.has_focus


async def test_each_timer_is_set_once(daemon: FakeDaemon) -> None:
    """Textual calls the `on_mount` of every class of a screen by itself: one that is called besides ticks twice."""
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        for keys in ("1", "2", "3", "4", "5", "6", "2\r", "3\r"):
            await typed(pilot, keys)
            timers = [timer for timer in app.screen._timers if isinstance(timer, Timer)]
            often = [timer._callback for timer in timers if timer._repeat is None]
            assert len(often) == len(set(often)), keys
            assert app.screen.tick in often
