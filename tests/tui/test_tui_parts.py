"""The parts of the terminal UI that draw nothing: order of rows, plots, notices."""

from __future__ import annotations

import random

import pytest
from fake_daemon import rollout, rollouts, running
from hypothesis import given
from hypothesis import strategies as st

from aglite.tui.feed import Snapshot
from aglite.tui.plot import Canvas, nice_range
from aglite.tui.rows import KEPT, PAGE, Rows
from aglite.tui.widgets.notice import notice
from aglite.tui.widgets.rollouts import fit


def test_what_runs_comes_first_then_the_latest_finished_then_the_queue() -> None:
    rows = Rows()
    rows.merge(rollouts(200, random.Random(1)))
    states = [row["state"] for row in rows.ordered]
    live = [state in ("starting", "running", "grading") for state in states]
    assert live == sorted(live, reverse=True)
    assert states[-12:] == ["queued"] * 12 and "queued" not in states[:-12]
    ended = [row["finished_at"] for row in rows.ordered if row["finished_at"]]
    assert ended == sorted(ended, reverse=True)


def test_a_page_replaces_what_it_knows_and_keeps_the_rest() -> None:
    rows, draw = Rows(), random.Random(1)
    rows.merge([rollout(2, "running", draw, id="b"), rollout(1, "done", draw, id="a")])
    rows.merge([rollout(3, "queued", draw, id="c"), rollout(2, "done", draw, id="b")])
    assert {row["id"]: row["state"] for row in rows.ordered} == {"a": "done", "b": "done", "c": "queued"}


def test_polls_reach_back_to_the_oldest_unfinished_rollout() -> None:
    rows, draw = Rows(), random.Random(1)
    rows.merge([rollout(number, "done", draw) for number in range(300, 0, -1)])
    assert rows.wanted() == PAGE
    rows.merge([rollout(100, "running", draw, id="old")])
    assert rows.wanted() > 200


def test_old_finished_rows_go_unfinished_ones_stay() -> None:
    rows, draw = Rows(), random.Random(1)
    rows.merge([rollout(0, "running", draw, id="old"), *(rollout(n, "done", draw) for n in range(1, KEPT + 50))])
    assert len(rows.ordered) in (KEPT, KEPT + 1)
    assert rows.ordered[0]["id"] == "old"


@given(st.lists(st.tuples(st.floats(-5, 20), st.floats(-5, 5)), max_size=8), st.integers(1, 40), st.integers(1, 12))
def test_any_curve_fits_its_canvas(points: list[tuple[float, float]], width: int, height: int) -> None:
    canvas = Canvas(width, height, (0, 10), (0, 1))
    canvas.line(points)
    rows = canvas.rows()
    assert len(rows) == height and all(len(row) == width for row in rows)
    assert any(row.strip() for row in rows) == bool(points)
    for point in points:
        column, row = canvas.cell(point)
        assert rows[row][column] != " "


def test_points_land_where_their_values_say() -> None:
    canvas = Canvas(11, 5, (0, 10), (0, 1))
    assert canvas.cell((0, 0)) == (0, 4) and canvas.cell((10, 1)) == (10, 0) and canvas.cell((5, 0.5)) == (5, 2)


@pytest.mark.parametrize(
    ("values", "expected"), [([0.2, 0.9], (0.0, 1.0)), ([3, 3], (2.0, 4.0)), ([-3, 14], (-10.0, 20.0))]
)
def test_axes_end_on_round_numbers(values: list[float], expected: tuple[float, float]) -> None:
    assert nice_range(values) == expected


def test_notices() -> None:
    status = running()["status"]
    assert notice(Snapshot("live", status, [])) == ("", "")
    text, level = notice(Snapshot("ended", {**status, "message": "model 'x' is not there\n  -> fetch it"}, []))
    assert (text, level) == ("Failed: model 'x' is not there -> fetch it", "error")
    assert notice(Snapshot("ended", {**status, "step": 12}, []))[1] == "good"
    assert notice(Snapshot("died", status, []))[1] == "error"


@given(st.text(), st.integers(0, 30), st.booleans())
def test_a_cell_has_its_width_and_nothing_a_terminal_obeys(text: str, width: int, right: bool) -> None:
    from rich.cells import cell_len

    cell = fit(text, width, right)
    assert cell_len(cell) == width
    assert cell.isprintable()
