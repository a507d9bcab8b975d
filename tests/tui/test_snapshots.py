"""What a person sees, as pictures. After a wanted change: `pytest tests/tui --snapshot-update`, and look at them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon, empty, leaked, running, with_gpu
from textual.pilot import Pilot
from tui_pilot import heard, make_app, settled

from aglite.paths import RunDir
from aglite.tui.widgets.rollouts import RolloutTable


def shown(*keys: str, link: str = "live") -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Hears of the run, presses keys, and waits until what they ask for is there."""

    async def press(pilot: Pilot[Any]) -> None:
        await heard(link)(pilot)
        for key in keys:
            await pilot.press(key)
            await settled(pilot)

    return press


SIZES = pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=["80x24", "200x50"])


@SIZES
def test_running(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=heard())


@SIZES
def test_empty(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    daemon.scene = empty()
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=heard())


@SIZES
def test_lost(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    async def lose(pilot: Pilot[Any]) -> None:
        await heard()(pilot)
        daemon.go_silent()
        pilot.app.feed.hurry()
        await heard("lost")(pilot)

    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=lose)


@SIZES
def test_finished(snap_compare: Any, finished: RunDir, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(finished), terminal_size=size, run_before=heard("ended"))


@SIZES
@pytest.mark.parametrize(
    "screen", ["2", "3", "4", "5", "6"], ids=["rollouts", "steps", "sandboxes", "events", "recipe"]
)
def test_screen(snap_compare: Any, daemon: FakeDaemon, screen: str, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=shown(screen))


@pytest.mark.parametrize(
    "screen", ["2", "3", "4", "5", "6"], ids=["rollouts", "steps", "sandboxes", "events", "recipe"]
)
def test_screen_of_a_run_that_is_over(snap_compare: Any, finished: RunDir, screen: str) -> None:
    assert snap_compare(make_app(finished), terminal_size=(100, 30), run_before=shown(screen, link="ended"))


@pytest.mark.parametrize("screen", ["2", "3", "4"], ids=["rollouts", "steps", "sandboxes"])
def test_screen_with_nothing_on_it(snap_compare: Any, daemon: FakeDaemon, screen: str) -> None:
    daemon.scene = empty()
    assert snap_compare(make_app(daemon.run_dir), run_before=shown(screen))


def test_rollouts_that_match(snap_compare: Any, daemon: FakeDaemon) -> None:
    keys = ["2", "slash", *"state:fail json", "enter", "o", "o"]
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(120, 30), run_before=shown(*keys))


def test_what_outlived_its_rollout(snap_compare: Any, daemon: FakeDaemon) -> None:
    daemon.scene["sandboxes"].append(leaked("r-0badc0ffee"))
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(120, 30), run_before=shown("4"))


def test_warnings_only(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), run_before=shown("5", "v"))


def test_only_differences_from_the_defaults(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), run_before=shown("6", "v", "down", "down"))


def a_rollout(*keys: str, state: str = "done") -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Opens a rollout with two calls, then presses `keys`."""

    async def show(pilot: Pilot[Any]) -> None:
        await shown("2")(pilot)
        table = pilot.app.screen.query_one(RolloutTable)
        wanted = next(place for place, row in enumerate(table.rows) if row["calls"] == 2 and row["state"] == state)
        table.move(wanted)
        await shown("enter", *keys)(pilot)

    return show


@SIZES
@pytest.mark.parametrize("page", [0, 1, 2, 3], ids=["messages", "tokens", "output", "reward"])
def test_rollout(snap_compare: Any, daemon: FakeDaemon, page: int, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=a_rollout(*["tab"] * page))


@pytest.mark.parametrize("mode", [1, 2], ids=["logprob", "version"])
def test_tokens_in_other_colours(snap_compare: Any, daemon: FakeDaemon, mode: int) -> None:
    keys = ["tab", *["v"] * mode]
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 30), run_before=a_rollout(*keys))


def test_why_it_failed(snap_compare: Any, daemon: FakeDaemon) -> None:
    keys = ["shift+tab"]
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 40), run_before=a_rollout(*keys, state="failed"))


def test_found_in_a_text(snap_compare: Any, daemon: FakeDaemon) -> None:
    keys = ["slash", *"lantern", "enter", "n"]
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 30), run_before=a_rollout(*keys))


def test_a_fork(snap_compare: Any, daemon: FakeDaemon) -> None:
    for detail in daemon.scene["details"].values():
        for call in detail["call_rows"][1:]:
            call |= {"fork_cause": "edited", "matched_id": 101, "fork_diff": FORK}
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(120, 30), run_before=a_rollout("j"))


FORK = {
    "against": 101,
    "message": {
        "index": 0,
        "roles": ["user", "user"],
        "before": ["Write one sentence of at most ", "12", " words"],
        "after": ["Write one sentence of at most ", "twelve", " words"],
    },
    "tools": None,
    "tokens": None,
}


def test_sure(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), run_before=shown("2", "x"))


def test_how_many_at_once(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), run_before=shown("c"))


def test_commands(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 30), run_before=shown("colon", *"check"))


def test_only_looking(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir, readonly=True), run_before=shown("2"))


def test_terminal_with_16_colours(snap_compare: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("TERM", "xterm-16color")
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 30), run_before=heard())


def test_quit_dialog(snap_compare: Any, daemon: FakeDaemon) -> None:
    async def ask(pilot: Pilot[Any]) -> None:
        await heard()(pilot)
        await pilot.press("q")

    assert snap_compare(make_app(daemon.run_dir), run_before=ask)


def test_help(snap_compare: Any, daemon: FakeDaemon) -> None:
    async def ask(pilot: Pilot[Any]) -> None:
        await heard()(pilot)
        await pilot.press("question_mark")

    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 40), run_before=ask)


def test_update_under_way_with_a_gpu(snap_compare: Any, daemon: FakeDaemon) -> None:
    daemon.scene = with_gpu(running())
    daemon.scene["status"] |= {
        "phase": "training",
        "gate": {"state": "closed", "held": 5},
        "message": "training: micro-batch 3 of 11",
    }
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(140, 40), run_before=heard())


def test_light(snap_compare: Any, daemon: FakeDaemon) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=(100, 30), press=["t"], run_before=heard())


@pytest.mark.parametrize("size", [(60, 16), (40, 10), (300, 80), (110, 50)], ids=["60x16", "40x10", "300x80", "110x50"])
def test_other_terminals(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=heard())


def test_nothing_there_yet(snap_compare: Any) -> None:
    assert snap_compare(make_app(RunDir(Path("runs/none"))), run_before=heard("ended"))
