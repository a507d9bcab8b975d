"""The parts of the terminal UI that draw nothing: order of rows, plots, notices."""

from __future__ import annotations

import random

import pytest
from fake_daemon import rollout, rollouts, running
from hypothesis import given
from hypothesis import strategies as st

from aglite.tui.feed import Snapshot
from aglite.tui.plot import Canvas, labels, stops, ticks
from aglite.tui.rows import KEPT, PAGE, Rows
from aglite.tui.widgets.notice import notice
from aglite.tui.widgets.table import fit
from aglite.tui.widgets.talk import message_lines


def test_arguments_that_are_nested_deeper_than_any_stack_are_shown_as_they_are() -> None:
    arguments = "[" * 5000
    call = {"function": {"name": "f", "arguments": arguments}}
    lines = message_lines({"role": "assistant", "content": "", "tool_calls": [call]}, 80)
    assert "".join(line.plain.strip() for line in lines[2:]) == arguments


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
    ("values", "most", "expected"),
    [
        ([0.2, 0.9], 6, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.2, 0.9], 2, ["0", "1"]),
        ([3, 3], 4, ["0", "1", "2", "3"]),
        ([0, 0], 3, ["0.0", "0.5", "1.0"]),
        ([-2, -2], 3, ["-2", "-1", "0"]),
        ([-3, 14], 5, ["-5", "0", "5", "10", "15"]),
        ([1.2e-4, 6e-4], 4, ["0", "2e-4", "4e-4", "6e-4"]),
        ([1.2, 1.9], 3, ["1.0", "1.5", "2.0"]),
        ([250_000, 1_900_000], 3, ["0", "1e6", "2e6"]),
        ([5e-324, 0], 9, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_axes_end_on_round_numbers(values: list[float], most: int, expected: list[str]) -> None:
    assert labels(ticks(values, most)) == expected


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.integers(0, 30))
def test_an_axis_spans_its_values(values: list[float], most: int) -> None:
    marks = ticks(values, most)
    slack = 1e-6 * (marks[-1] - marks[0])
    assert marks[0] - slack <= min(values) and max(values) <= marks[-1] + slack
    assert 2 <= len(marks) <= max(most, 2) + 1 and len(labels(marks)) == len(marks)


def test_steps_are_named_at_round_numbers() -> None:
    assert stops(12, 3) == [0, 5, 10] and stops(12, 100) == list(range(13)) and stops(1000, 1) == [0]
    assert stops(0, 4) == [0]


def test_notices() -> None:
    status = running()["status"]
    assert notice(Snapshot("live", status, [])) == ("", "")
    text, level = notice(Snapshot("ended", {**status, "message": "model 'x' is not there\n  -> fetch it"}, []))
    assert (text, level) == ("Failed: model 'x' is not there -> fetch it", "error")
    said = {"kind": "run", "level": "error", "text": "the disk is gone\n  | x", "data": {"mend": "put it back"}}
    failed = {**status, "message": "the disk is gone", "log": [*status["log"], said]}
    assert notice(Snapshot("ended", failed, []))[0] == "Failed: the disk is gone → put it back"
    assert notice(Snapshot("ended", {**failed, "message": "another"}, []))[0] == "Failed: another"
    assert notice(Snapshot("ended", {**status, "step": 12}, []))[1] == "good"
    assert notice(Snapshot("died", status, []))[1] == "error"


@given(st.text(), st.integers(0, 30), st.booleans())
def test_a_cell_has_its_width_and_nothing_a_terminal_obeys(text: str, width: int, right: bool) -> None:
    from rich.cells import cell_len

    cell = fit(text, width, right)
    assert cell_len(cell) == width
    assert cell.isprintable()
