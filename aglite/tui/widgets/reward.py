"""Reward over steps with its validation points: a plot where there is room, a sparkline where there is a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.content import Content

from aglite import units
from aglite.tui.plot import Canvas, nice_range
from aglite.tui.widgets.panel import Panel, faint, lines, row

AXIS = 6
"""Columns left of the plot: numbers and the axis."""


class Reward(Panel):
    BORDER_TITLE = "reward"

    def draw(self, width: int, height: int, now: float) -> Content:
        status = self.snapshot.status or {}
        reward, val = status.get("reward") or [], status.get("val") or []
        if height < 5 or width < 30:
            return self._line(reward, val, width)
        legend = self._legend(reward, val, width)
        if not reward and not val:
            return lines(legend, Content(""), faint("  the curve begins with the first evaluation or step"))
        return lines(legend, *self._plot(reward, val, status.get("steps") or 1, width, height - 1))

    def _line(self, reward: list[dict[str, Any]], val: list[dict[str, Any]], width: int) -> Content:
        return self._legend(reward, val, width, [point["mean"] for point in reward])

    def _legend(
        self, reward: list[dict[str, Any]], val: list[dict[str, Any]], width: int, curve: Sequence[float] = ()
    ) -> Content:
        """The numbers in a line, with the curve between them; the word is cut before a number is lost."""
        left, right = self._latest(reward), self._validation(val, "validation")
        if left.cell_length + right.cell_length >= width:
            right = self._validation(val, "val")
        room = width - left.cell_length - right.cell_length - 4
        line = units.sparkline(curve, min(max(room, 0), 40))
        return row(Content.assemble(left, "  ", (line, "$primary")) if line else left, right, width)

    def _latest(self, reward: list[dict[str, Any]]) -> Content:
        if not reward:
            return Content.assemble((" ● reward ", "$primary"), ("no step yet", "$faint"))
        last = reward[-1]
        spread = f" ± {last['std']:.2f}" if last.get("std") is not None else ""
        return Content.assemble((" ● reward ", "$primary"), (units.reward(last["mean"]), "bold"), (spread, "$faint"))

    def _validation(self, val: list[dict[str, Any]], name: str) -> Content:
        if not val:
            return Content.assemble((f"◆ {name} ", "$accent"), ("not yet ", "$faint"))
        parts: list[Any] = [(f"◆ {name} ", "$accent")]
        if len(val) > 1:
            parts += [units.reward(val[0]["mean"]), (" → ", "$faint")]
        parts.append((units.reward(val[-1]["mean"]), "bold"))
        parts.append((f" ± {val[-1]['stderr']:.2f} ", "$faint"))
        return Content.assemble(*parts)

    def _plot(
        self, reward: list[dict[str, Any]], val: list[dict[str, Any]], steps: int, width: int, height: int
    ) -> list[Content]:
        curve = [(float(point["step"]), point["mean"]) for point in reward]
        marks = [(float(point["step"]), point["mean"]) for point in val]
        across = (0.0, float(max([steps, *(int(x) for x, _ in curve + marks)])))
        upright = nice_range([y for _, y in curve + marks])
        rows = height - 2  # below: the axis and its numbers
        canvas = Canvas(width - AXIS - 1, rows, across, upright)
        canvas.line(curve)
        drawn = [Content.styled(text, "$primary") for text in canvas.rows()]
        dots = curve if len(curve) * 3 <= canvas.width else curve[-1:]
        for points, mark, style in ((dots, "●", "$primary"), (marks, "◆", "bold $accent")):
            for point in points:
                column, at = canvas.cell(point)
                drawn[at] = Content.assemble(drawn[at][:column], (mark, style), drawn[at][column + 1 :])
        ticks = {0: upright[1], rows - 1: upright[0]}
        if rows >= 5:
            ticks[(rows - 1) // 2] = sum(upright) / 2
        left = [f"{ticks[i]:>4.1f} ┤" if i in ticks else "     │" for i in range(rows)]
        plotted = [Content.assemble((label, "$faint"), text) for label, text in zip(left, drawn, strict=True)]
        return [*plotted, *self._below(int(across[1]), width - AXIS - 1)]

    def _below(self, last: int, width: int) -> list[Content]:
        """The axis of steps with its ends and middle named."""
        numbers = [" "] * width
        for share in (0.0, 0.5, 1.0):
            if share == 0.5 and last % 2:
                continue
            text = str(round(last * share))
            at = min(round(share * (width - 1)), width - len(text))
            numbers[at : at + len(text)] = text
        return [faint("     └" + "─" * width), faint(" step " + "".join(numbers))]
