"""Curves in text: pure functions from points to lines of braille, with axes that carry real numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell by row and column."""


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


def nice_range(values: Sequence[float]) -> tuple[float, float]:
    """A range around the values that ends on round numbers: 0 to 1 for rewards that lie in it."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10(high - low))
    return math.floor(low / step) * step, math.ceil(high / step) * step
