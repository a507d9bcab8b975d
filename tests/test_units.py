from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite import units


@pytest.mark.parametrize(
    ("seconds", "clock", "age"),
    [
        (None, "–", "–"),
        (-3, "0:00", "0s"),
        (59.9, "0:59", "59s"),
        (60, "1:00", "1m"),
        (3599, "59:59", "59m"),
        (3725, "1:02:05", "1h"),
        (86400 * 3 + 3600 * 4, "3d 04:00", "3d"),
    ],
)
def test_times(seconds: float | None, clock: str, age: str) -> None:
    assert (units.clock(seconds), units.age(seconds)) == (clock, age)


@pytest.mark.parametrize(
    ("number", "text"), [(None, "–"), (0, "0"), (9999, "9999"), (12345, "12.3k"), (123456, "123k"), (4.1e6, "4.1M")]
)
def test_counts(number: float | None, text: str) -> None:
    assert units.count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5.1 * 2**30, "5.1 GiB"), (300 * 2**30, "300 GiB")],
)
def test_sizes(number: float, text: str) -> None:
    assert units.size(number) == text


def test_sparkline_spans_its_own_range_and_keeps_the_newest() -> None:
    assert units.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert units.sparkline([9, 0, 7], width=2) == "▁█"
    assert units.sparkline([3, 3]) == "▄▄"
    assert units.sparkline([0, 0], floor=0.0) == "▁▁"
    assert units.sparkline([7, 0, 7], floor=0.0) == "█▁█"
    assert units.sparkline([], 5) == "" == units.sparkline([1, 2], 0)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_progress_has_its_width_and_is_full_only_at_the_end(done: int, total: int, width: int) -> None:
    bar = units.progress(done, total, width)
    assert len(bar) == width
    if width and total:
        assert (bar == "━" * width) == (done >= total or round(2 * width * done / total) == 2 * width)


@given(st.text())
def test_plain_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    cleaned = units.plain(text)
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in cleaned)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("a\rb\x08c\x9b2J", "abc2J"),
        ("one\ntwo\tthree", "one\ntwo     three"),
        ("東京 naïve", "東京 naïve"),
        ("\x1b", ""),
        ("\ud83d, half of 😀", r"\ud83d, half of 😀"),
    ],
)
def test_plain_text(raw: str, clean: str) -> None:
    assert units.plain(raw) == clean
    assert units.plain_json({"a": [raw, 1, None]}) == {"a": [clean, 1, None]}


def test_versions_from_first_to_last() -> None:
    assert [units.version_span(known) for known in ([], [None, None], [3, 3], [3, 4, 6])] == ["", "", "v3", "v3–6"]
    assert units.versions({"policy_version_min": 2, "policy_version_max": 3}) == "v2–3"
