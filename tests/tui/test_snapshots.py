"""What a person sees, as pictures. After a wanted change: `pytest tests/tui --snapshot-update`, and look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon, empty, running, with_gpu
from textual.pilot import Pilot
from tui_pilot import heard, make_app, until

from aglite.paths import RunDir

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
def test_rollout(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    async def open_one(pilot: Pilot[Any]) -> None:
        await heard()(pilot)
        table = pilot.app.screen.query_one("#rollouts")
        wanted = next(place for place, row in enumerate(table.rows) if row["calls"] == 2 and row["state"] == "done")
        await pilot.press(*["down"] * wanted, "enter")
        await until(pilot, lambda: getattr(pilot.app.screen, "_detail", None), "the rollout is shown")

    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=open_one)


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


@pytest.mark.parametrize("size", [(60, 16), (40, 10)], ids=["60x16", "40x10"])
def test_small_terminals(snap_compare: Any, daemon: FakeDaemon, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(daemon.run_dir), terminal_size=size, run_before=heard())


def test_nothing_there_yet(snap_compare: Any) -> None:
    assert snap_compare(make_app(RunDir(Path("runs/none"))), run_before=heard("ended"))
