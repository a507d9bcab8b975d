"""The terminal UI driven by keys, against a control API on a real socket."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from fake_daemon import NOW, FakeDaemon, rollouts, running
from tui_pilot import heard, make_app, settled, until

from aglite.paths import RunDir
from aglite.tui.app import AgliteApp
from aglite.tui.screens.run import RunScreen
from aglite.tui.widgets.events import EventTable
from aglite.tui.widgets.rollouts import RolloutTable


def run_screen(app: AgliteApp) -> RunScreen:
    screen = app.screen_stack[0]
    assert isinstance(screen, RunScreen)
    return screen


def table(app: AgliteApp) -> RolloutTable:
    """The table in front, else that of the first screen."""
    found = app.screen.query(RolloutTable) or app.screen_stack[0].query(RolloutTable)
    return found.first(RolloutTable)


def text(app: AgliteApp) -> str:
    """The screen as plain text."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text[:width] for strip in lines[:height])


async def test_pause_and_resume(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        assert not app.check_action("resume", ())
        await pilot.press("p")
        await until(pilot, lambda: app.snapshot.status["phase"] == "paused", "it is paused")
        assert not app.check_action("pause", ())
        assert "paused: asked for" in text(app)
        await pilot.press("p", "r")  # p means nothing now
        await until(pilot, lambda: app.snapshot.status["phase"] == "rollout", "it goes on")
    assert [action for action, _ in daemon.posted] == ["pause", "resume"]


async def test_a_refusal_is_shown_and_nothing_breaks(daemon: FakeDaemon) -> None:
    daemon.refuse["/api/pause"] = (409, {"detail": "cannot pause now", "mend": "try again when the model is loaded"})
    app = make_app(daemon.run_dir)
    async with app.run_test(notifications=True) as pilot:
        await heard()(pilot)
        await pilot.press("p")
        await until(pilot, lambda: "cannot pause now" in text(app), "the refusal is shown")


@pytest.mark.parametrize(
    ("keys", "wish"),
    [
        (["q", "l"], "leave"),
        (["q", "s"], "stop"),
        (["q", "enter"], "leave"),
        (["d"], "leave"),
        (["ctrl+c", "s"], "stop"),
        (["slash", "a", "ctrl+c", "s"], "stop"),
    ],
)
async def test_quit_asks_and_detach_does_not(daemon: FakeDaemon, keys: list[str], wish: str) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        for key in keys:
            await pilot.press(key)
        await until(pilot, lambda: app.return_value is not None, "it has left")
    assert app.return_value == wish
    assert daemon.posted == []  # stopping is the command's part: it waits and says what for


async def test_quit_can_be_taken_back(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await pilot.press("q", "escape", "down")
        assert app.return_value is None and app.screen is run_screen(app)


async def test_survives_the_end_of_the_supervisor_and_finds_the_next(daemon: FakeDaemon) -> None:
    app = AgliteApp(daemon.run_dir, interval_s=0.05)
    async with app.run_test() as pilot:
        await heard()(pilot)
        daemon.go_silent()
        await heard("lost")(pilot)
        assert "No answer from the supervisor" in text(app)
        await pilot.press("p", "enter")
        await until(pilot, lambda: app.screen is not run_screen(app), "the rollout is open")
        await pilot.press("escape", "down")
        daemon.end()
        await heard("ended")(pilot)
        assert "Stopped after step 7 of 12" in text(app)
        again = FakeDaemon(daemon.run_dir, running())
        await heard("live")(pilot)
        again.end()


async def test_a_dead_supervisor_is_named(daemon: FakeDaemon) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE)  # noqa: ASYNC221
    daemon.run_dir.control.write_text(json.dumps({"url": daemon.url, "token": "x", "pid": int(gone.stdout)}))
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard("died")(pilot)
        assert "The supervisor died" in text(app)


async def test_finished_run_is_read_from_its_database(finished: RunDir) -> None:
    app = make_app(finished)
    async with app.run_test(size=(160, 40)) as pilot:
        await heard("ended")(pilot)
        shown = text(app)
        assert "Finished: validation 0.35 → 0.60. Use it: aglite serve runs/words/checkpoints/step-2" in shown
        assert "step 2 · reward 0.500 ± 0.50" in shown
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "continues 1" in text(app), "the rollout is shown")
        await pilot.press("tab")
        await until(pilot, lambda: "3 of 7 tokens carry loss" in text(app), "its tokens are shown")
        await pilot.press("tab")
        await until(pilot, lambda: "hello from the agent" in text(app), "its output is shown")
        await pilot.press("escape", "q")
        await until(pilot, lambda: app.return_value is not None, "it has left without asking")


async def test_no_token_is_accepted_from_an_unknown_daemon(daemon: FakeDaemon) -> None:
    daemon.token = "another"
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(160, 40)) as pilot:
        await heard("lost")(pilot)
        assert "does not accept the token" in text(app)


async def test_cursor_stays_on_its_rollout_while_the_table_moves(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await pilot.press("down", "down", "down")
        chosen = table(app).selected["id"]
        newer = rollouts(400, random.Random(3))[:30]
        daemon.scene["rollouts"] = newer + daemon.scene["rollouts"]
        app.feed.hurry()
        await until(pilot, lambda: len(table(app).rows) > 180, "the new rows are there")
        assert table(app).selected["id"] == chosen and table(app).cursor > 3
        await pilot.press("f")
        assert table(app).cursor == 0


async def test_keys_move_through_a_thousand_rows(daemon: FakeDaemon) -> None:
    daemon.scene["rollouts"] = rollouts(1000, random.Random(5))
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(120, 40)) as pilot:
        await heard()(pilot)
        await pilot.press("2")
        await until(pilot, lambda: len(table(app).rows) == 1000, "the rollouts are shown")
        await pilot.press("end")
        assert table(app).cursor == 999
        assert table(app).rows[999]["id"][:8] in text(app)
        await pilot.press("pageup", "k", "home", "j")
        assert table(app).cursor == 1
        drawn: list[int] = []
        original = table(app)._line
        table(app)._line = lambda index, width: drawn.append(index) or original(index, width)  # type: ignore[method-assign]
        await pilot.press(*["down"] * 5)
        assert len(drawn) <= 10 + 2 * 5  # the lines that the cursor leaves and enters, not the table


async def test_only_changed_lines_are_repainted(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(120, 50)) as pilot:
        await heard()(pilot)
        drawn: list[int] = []
        original = table(app)._line
        table(app)._line = lambda index, width: drawn.append(index) or original(index, width)  # type: ignore[method-assign]
        rows = [dict(row) for row in table(app).rows]
        rows[4]["calls"] += 1
        table(app).show(rows, NOW, "")
        await until(pilot, lambda: drawn, "it is painted")
        await settled(pilot)
        assert drawn == [4]


async def test_the_screen_is_not_laid_out_anew_for_a_longer_list(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(120, 50)) as pilot:
        await heard()(pilot)
        shown, screen = table(app), app.screen
        laid_out: list[int] = []
        original = screen._compositor.reflow
        screen._compositor.reflow = lambda *args: laid_out.append(1) or original(*args)  # type: ignore[method-assign]
        rows = [dict(row) for row in shown.rows]
        shown.show([*rows, *({**row, "id": row["id"][::-1]} for row in rows)], NOW, "")
        await settled(pilot)
        assert not laid_out and shown.max_scroll_y == 2 * len(rows) + 1 - shown.size.height
        await pilot.press("end")
        assert text(app).count(shown.rows[-1]["id"][:8]) == 1
        shown.show(rows, NOW, "")
        await settled(pilot)
        assert not laid_out and shown.scroll_offset.y == shown.max_scroll_y == len(rows) + 1 - shown.size.height
        shown.show(rows[:2], NOW, "")
        await until(pilot, lambda: laid_out, "it is laid out anew")
        await settled(pilot)
        assert laid_out and shown.scroll_offset.y == 0  # the scroll bar is gone


async def test_mouse_opens_a_rollout(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        await pilot.click("#rollouts", offset=(5, 4))
        assert table(app).cursor == 2
        await pilot.click("#rollouts", offset=(5, 4), times=2)
        await until(pilot, lambda: app.screen is not run_screen(app), "it is open")


async def test_events_are_kept_beyond_what_one_status_holds(daemon: FakeDaemon) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        log = run_screen(app).query_one(EventTable)
        more = [{**event, "id": event["id"] + 10} for event in daemon.scene["status"]["log"]]
        for _ in range(2):
            log.add(more, NOW, "")
            assert len(log.rows) == 24


async def test_light_and_dark_are_switched_where_the_terminal_is_light(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")
    app = make_app(daemon.run_dir)
    async with app.run_test() as pilot:
        await heard()(pilot)
        seen = [app.theme]
        for _ in range(2):
            await pilot.press("t")
            seen.append(app.theme)
    assert seen == ["aglite-light", "aglite-dark", "aglite-light"]


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (20, 6), (79, 23), (300, 80)])
async def test_no_size_breaks_it(daemon: FakeDaemon, size: tuple[int, int]) -> None:
    app = make_app(daemon.run_dir)
    async with app.run_test(size=size) as pilot:
        await heard()(pilot)
        await pilot.press("down", "enter")
        await pilot.pause()
        await pilot.press("escape", "q", "escape", "question_mark", "escape")
        assert app.return_value is None


async def test_control_text_from_an_agent_stays_text(daemon: FakeDaemon) -> None:
    """Names and causes are not markup, and no escape sequence of theirs reaches the terminal."""
    row = daemon.scene["rollouts"][30]
    row |= {"task_id": "[bold]x[/nope]", "cause": "\x1b]0;owned\x07 [red]"}
    daemon.scene["status"]["message"] = "loading [/b] \x1b[2J"
    daemon.scene["details"][row["id"]] |= {**row, "log_tail": "a\x1b[2J[/b]\nb"}
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(160, 50)) as pilot:
        await heard()(pilot)
        await pilot.press("2")
        await until(pilot, lambda: "[bold]x[/nope]" in text(app), "the rollouts are shown")
        assert "\x1b" not in text(app) and "\x07" not in text(app)
        table(app).move(next(place for place, shown in enumerate(table(app).rows) if shown["id"] == row["id"]))
        await pilot.press("enter")
        await until(pilot, lambda: "messages" in text(app), "the rollout is shown")
        await pilot.press("tab", "tab")
        await until(pilot, lambda: "a[/b]" in text(app), "the log is shown")
        assert "\x1b" not in text(app)


async def test_wide_characters_do_not_break_the_columns(daemon: FakeDaemon) -> None:
    daemon.scene["rollouts"][30]["task_id"] = "東京の天気予報を調べる課題" * 3
    app = make_app(daemon.run_dir)
    async with app.run_test(size=(160, 50)) as pilot:
        await heard()(pilot)
        lines = app.screen._compositor.render_strips()
        assert {strip.cell_length for strip in lines} == {160}


def test_every_binding_of_the_table_has_its_action() -> None:
    from aglite.tui import keys
    from aglite.tui.screens.recipe import RecipeTable
    from aglite.tui.screens.rollout import RolloutScreen
    from aglite.tui.screens.sandboxes import SandboxTable
    from aglite.tui.widgets.table import Table

    owners = (
        (AgliteApp, (*keys.GO, *keys.STEER, *keys.APP)),
        (RunScreen, keys.FIND),
        (Table, keys.TABLE),
        (RolloutTable, keys.ROLLOUTS),
        (RolloutScreen, (*keys.ROLLOUT, *keys.ROLLOUTS)),
        (SandboxTable, keys.SANDBOXES),
        (EventTable, keys.EVENTS),
        (RecipeTable, keys.RECIPE),
    )
    for owner, table in owners:
        for key in table:
            assert hasattr(owner, f"action_{key.action.partition('(')[0]}"), key
    shown = [key for _, table in keys.HELP for key in table]
    assert {key for _, table in owners for key in table} <= set(shown)


def test_no_two_keys_of_one_place_are_the_same() -> None:
    from aglite.tui import keys

    everywhere = (*keys.GO, *keys.STEER, *keys.APP, *keys.FIND)
    for table in (
        keys.TABLE + keys.ROLLOUTS,
        keys.TABLE + keys.SANDBOXES,
        keys.TABLE + keys.EVENTS,
        keys.TABLE + keys.RECIPE,
    ):
        pressed = [name for key in (*everywhere, *table) for name in key.keys.split(",")]
        assert len(pressed) == len(set(pressed))
