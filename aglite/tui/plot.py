"""Curves in text: pure functions from points to lines of braille, with axes that carry real numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from aglite import units

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell by row and column."""
_SMALLEST = 1e-200
"""What is nearer to 0 is 0: parts of it could not be told from 0."""


class Canvas:
    """`width` x `height` cells, each 2 x 4 dots, over the given ranges of x and y."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.width, self.height = width, height
        self.x, self.y = x, y
        self._cells = [[0] * width for _ in range(height)]

    def dot(self, point: Point) -> tuple[int, int]:
        """The dot (column, row from the top) of a point."""
        return (
            _place(point[0], self.x, 2 * self.width - 1),
            4 * self.height - 1 - _place(point[1], self.y, 4 * self.height - 1),
        )

    def cell(self, point: Point) -> tuple[int, int]:
        """The cell (column, row from the top) of a point."""
        column, row = self.dot(point)
        return column // 2, row // 4

    def line(self, points: Sequence[Point]) -> None:
        """Draw through the points in order; a single one is a dot."""
        dots = [self.dot(point) for point in points]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            reach = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
            for i in range(reach + 1):
                column = round(start[0] + (end[0] - start[0]) * i / reach)
                row = round(start[1] + (end[1] - start[1]) * i / reach)
                self._cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]

    def rows(self) -> list[str]:
        return ["".join(chr(0x2800 + bits) if bits else " " for bits in row) for row in self._cells]


def _place(value: float, span: tuple[float, float], last: int) -> int:
    low, high = span
    share = (value - low) / (high - low) if high > low else 0.5
    return round(min(max(share, 0.0), 1.0) * last)


def ticks(values: Sequence[float], most: int) -> list[float]:
    """Two to `most` evenly spaced round numbers that span the values; the first and the last end the axis.

    The distance is 1, 2 or 5 times a power of ten. Values between 0 and 1 are spanned by 0 to 1 itself, so that rewards
    are seen for what they are, unless all are tiny; others begin at 0 where that costs little of the picture.
    """
    low, high = (0.0 if abs(value) < _SMALLEST else value for value in (min(values), max(values)))
    if low >= 0 and 0.02 < high <= 1:
        low, high = 0.0, 1.0
    elif low > 0 and low < 0.5 * high:
        low = 0.0
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) if low else 1.0
    for step in _round_steps((high - low) / max(most - 1, 1)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first + 1 <= max(most, 2):
            return [index * step for index in range(first, max(last, first + 1) + 1)]
    raise AssertionError("steps grow without end")


def stops(last: float, most: int) -> list[int]:
    """At most `most` evenly spaced round whole numbers from 0 to `last`."""
    for step in _round_steps(1):
        if last // step + 1 <= max(most, 1):
            return list(range(0, math.floor(last) + 1, round(step)))
    raise AssertionError("steps grow without end")


def _round_steps(least: float) -> Iterator[float]:
    """1, 2 and 5 times powers of ten, from `least` on."""
    exponent = math.floor(math.log10(least) + 1e-9)
    while True:
        yield from (factor * 10.0**exponent for factor in (1, 2, 5) if factor * 10.0**exponent >= least * (1 - 1e-9))
        exponent += 1


def labels(values: Sequence[float]) -> list[str]:
    """Numbers of an axis, with as many digits as tell them apart."""
    step = abs(values[1] - values[0]) if len(values) > 1 else abs(values[0]) or 1.0
    if step < 1e-3 or step >= 1e5:
        return ["0" if abs(value) < step / 2 else units.scientific(value) for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{abs(value) if abs(value) < step / 2 else value:.{digits}f}" for value in values]
