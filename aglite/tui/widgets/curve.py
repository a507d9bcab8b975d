"""Numbers over training steps: a plot where there is room, a sparkline where there is a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from textual.content import Content

from aglite import units
from aglite.tui.plot import Canvas, Point, labels, stops, ticks
from aglite.tui.widgets.panel import Panel, faint, lines, row

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve with a line through its points, or (`mark`) single points that stand out."""

    name: str
    points: Callable[[Status], Sequence[Point]]
    style: str
    said: Callable[[Status], list[Any]]
    """The latest numbers, as parts of Content."""
    mark: str = ""
    short: str = ""
    """The name where there is little room."""


class Curve(Panel):
    """One or two series over the steps."""

    def __init__(self, title: str, series: Sequence[Series], nothing: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = title
        self._series = series
        self._nothing = nothing
        self._plotted: tuple[Any, Content] = None, Content("")

    def draw(self, width: int, height: int, now: float) -> Content:
        """Points come with a step, news every second: it is drawn anew when there is something new."""
        status = self.snapshot.status or {}
        points = [list(each.points(status)) for each in self._series]
        wanted = width, height, status.get("steps"), points, [each.said(status) for each in self._series]
        if wanted != self._plotted[0]:
            self._plotted = wanted, self._drawing(status, points, width, height)
        return self._plotted[1]

    def _drawing(self, status: Status, points: list[list[Point]], width: int, height: int) -> Content:
        if height < 5 or width < 24:
            return self._legend(status, width, [y for _, y in points[0]])
        legend = self._legend(status, width)
        if not any(points):
            return lines(legend, Content(""), faint(f"  {self._nothing}").truncate(width, ellipsis=True))
        return lines(legend, *self._plot(points, status.get("steps") or 1, width, height - 1))

    def _legend(self, status: Status, width: int, curve: Sequence[float] = ()) -> Content:
        """The numbers in a line, with the curve between them; a series is left out before a number is cut."""
        for short in (False, True):
            left, right = self._said(0, status, short), self._said(1, status, short)
            if left.cell_length + right.cell_length < width:
                break
        room = width - left.cell_length - right.cell_length - 4
        line = units.sparkline(curve, min(max(room, 0), 40))
        if line:
            left = Content.assemble(left, "  ", (line, self._series[0].style))
        return row(left, Content.assemble(right, " "), width)

    def _said(self, index: int, status: Status, short: bool) -> Content:
        """The name of a series and its latest numbers."""
        if index >= len(self._series):
            return Content("")
        each = self._series[index]
        name = (short and each.short) or each.name
        return Content.assemble((f" {each.mark or '●'} {name} ", each.style), *(each.said(status) or [("–", "$faint")]))

    def _plot(self, series: list[list[Point]], steps: int, width: int, height: int) -> list[Content]:
        everything = [point for points in series for point in points]
        rows = height - 2  # below: the axis and its numbers
        marks = ticks([y for _, y in everything], max(rows // 3 + 1, 2))
        names = labels(marks)
        wide = max(map(len, names)) + 2
        across = (0.0, float(max([steps, *(int(x) for x, _ in everything)])))
        canvas = Canvas(max(width - wide - 2, 2), rows, across, (marks[0], marks[-1]))
        for each, points in zip(self._series, series, strict=True):
            if not each.mark:
                canvas.line(points)
        drawn = [Content.styled(text, self._series[0].style) for text in canvas.rows()]
        for each, points in zip(self._series, series, strict=True):
            dots = points if each.mark or len(points) * 3 <= canvas.width else points[-1:]
            for point in dots:
                column, at = canvas.cell(point)
                mark = (each.mark or "●", f"bold {each.style}" if each.mark else each.style)
                drawn[at] = Content.assemble(drawn[at][:column], mark, drawn[at][column + 1 :])
        at_row = {canvas.cell((0.0, value))[1]: name for value, name in zip(marks, names, strict=True)}
        left = [f"{at_row[i]:>{wide - 1}} ┤" if i in at_row else " " * wide + "│" for i in range(rows)]
        plotted = [Content.assemble((label, "$faint"), text) for label, text in zip(left, drawn, strict=True)]
        return [*plotted, *_below(across, canvas, wide)]


def _below(across: tuple[float, float], canvas: Canvas, wide: int) -> list[Content]:
    """The axis of steps with round numbers under their places; what lies beyond the last step is not named."""
    line, numbers = ["─"] * canvas.width, [" "] * (canvas.width + wide + 1)
    numbers[1:5] = "step"
    free = wide + 1
    for value in stops(across[1], canvas.width // 8):
        column = canvas.cell((value, 0.0))[0]
        text = str(value)
        at = min(wide + 1 + column - len(text) // 2, len(numbers) - len(text))
        if (at < free and value > 0) or at < 6:
            at = max(at, 6)
            if at < free:
                continue
        line[column] = "┴"
        numbers[at : at + len(text)] = text
        free = at + len(text) + 1
    return [faint(" " * wide + "└" + "".join(line)), faint("".join(numbers))]


def reward() -> Curve:
    return Curve(
        "reward",
        (
            Series("reward", lambda s: _points(s, "reward", "mean"), "$primary", _reward_said),
            Series(
                "validation", lambda s: _points(s, "val", "mean"), "$accent", _validation_said, mark="◆", short="val"
            ),
        ),
        "the curve begins with the first evaluation or step",
        id="reward",
    )


def entropy() -> Curve:
    series = Series(
        "entropy",
        lambda s: _points(s, "entropy", "value"),
        "$secondary",
        _latest("entropy", lambda value: f"{value:.2f}", "nats"),
    )
    return Curve("entropy", (series,), "after the first step", id="entropy")


def kl() -> Curve:
    series = Series(
        "KL to the sampler", lambda s: _points(s, "kl", "value"), "$success", _latest("kl", units.scientific, "nats")
    )
    return Curve("KL to the sampler", (series,), "after the first step", id="kl")


def _points(status: Status, key: str, value: str) -> list[Point]:
    return [(float(point["step"]), point[value]) for point in status.get(key) or [] if point[value] is not None]


def _latest(key: str, form: Callable[[float], str], unit: str) -> Callable[[Status], list[Any]]:
    def said(status: Status) -> list[Any]:
        points = status.get(key) or []
        return [(form(points[-1]["value"]), "bold"), (f" {unit}", "$faint")] if points else []

    return said


def _reward_said(status: Status) -> list[Any]:
    points = status.get("reward") or []
    if not points:
        return [("no step yet", "$faint")]
    spread = f" ± {points[-1]['std']:.2f}" if points[-1].get("std") is not None else ""
    return [(units.reward(points[-1]["mean"]), "bold"), (spread, "$faint")]


def _validation_said(status: Status) -> list[Any]:
    points = status.get("val") or []
    if not points:
        return [("not yet", "$faint")]
    first = [units.reward(points[0]["mean"]), (" → ", "$faint")] if len(points) > 1 else []
    return [*first, (units.reward(points[-1]["mean"]), "bold"), (f" ± {points[-1]['stderr']:.2f}", "$faint")]
