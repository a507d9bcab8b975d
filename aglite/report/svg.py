"""Charts as SVG, drawn here: lines with intervals, and boxes. Pure functions.

Colours are CSS variables of the page (`--s0` ...), so that a chart is light or dark with it and prints well; each
series has a dash pattern of its own besides, for those who cannot tell the colours. Points say their value when pointed
at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

WIDTH, HEIGHT = 540, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 12, 44
COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4", "1 4", "9 3 2 3 2 3")
BEYOND = 0.01
"""How far a value may reach past the outermost line of the grid, in steps of it: nobody sees that."""
SIDE_STEP = 6
"""How far whiskers at the same x stand from each other."""
MOST_MARKS = 60
"""Points of a series that are drawn as marks; those of a longer one would run into each other."""
MOST_HINTS = 400
"""Points of a series that can be pointed at."""


@dataclass(slots=True)
class Series:
    """Values over x. `low` and `high` are an interval at each point, drawn as a band or as whiskers."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    whiskers: bool = False
    faint: bool = False
    """A companion of the series with the same colour, such as its maximum."""


@dataclass(slots=True)
class Box:
    """A distribution: its quantiles at 5, 25, 50, 75 and 95%."""

    name: str
    colour: int
    quantiles: Sequence[float]
    n: int = field(default=0)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or below `low` to at or above `high` (but for BEYOND): steps of 1, 2 or 5 times a power of
    ten."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= raw * (1 - 1e-9)), 10 * power)
    first, last = math.floor(low / step + BEYOND), math.ceil(high / step - BEYOND)
    return [round(number * step, 12) for number in range(first, last + 1)]


def number(value: float) -> str:
    """A value as a chart says it: four significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def line_chart(id: str, title: str, series: Sequence[Series], x_name: str, zero: bool = False) -> Markup:
    """Series over a common x of whole numbers. `zero` keeps 0 on the y axis."""
    shown = [one for one in series if any(map(math.isfinite, one.y))]
    if not shown:
        return Markup("")
    ys = [y for one in shown for values in (one.y, one.low, one.high) for y in values if math.isfinite(y)]
    xs = [x for one in shown for x in one.x]
    y_ticks = ticks(min([*ys, 0.0]) if zero else min(ys), max([*ys, 0.0]) if zero else max(ys))
    x_span, y_span = (min(xs), max(xs)), (y_ticks[0], y_ticks[-1])
    if x_span[0] == x_span[1]:
        x_span = (x_span[0] - 0.5, x_span[1] + 0.5)
    x_ticks = [tick for tick in ticks(*x_span) if tick == int(tick)]

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_span[0]) / (x_span[1] - x_span[0]) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y_span[1] - y) / (y_span[1] - y_span[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [_grid_y(tick, at(x_span[0], tick)[1]) for tick in y_ticks]
    parts += [_tick_x(tick, at(tick, y_span[0])[0]) for tick in x_ticks if x_span[0] <= tick <= x_span[1]]
    parts.append(_x_name(x_name))
    for place, one in enumerate(shown):
        beside = SIDE_STEP * (place - (len(shown) - 1) / 2) if one.whiskers else 0.0
        parts.append(_drawn(one, lambda x, y, beside=beside: (at(x, y)[0] + beside, at(x, y)[1])))
    what = f"{', '.join(one.name for one in shown)} by {x_name}; the numbers are in the table below."
    return _svg(id, title, what, parts, HEIGHT)


def box_chart(id: str, title: str, boxes: Sequence[Box], x_name: str) -> Markup:
    """Distributions of positive values below each other, on a logarithmic axis where they spread widely."""
    shown = [box for box in boxes if box.n]
    if not shown:
        return Markup("")
    low, high = min(box.quantiles[0] for box in shown), max(box.quantiles[-1] for box in shown)
    logarithmic = low > 0 and high / low > 50
    if logarithmic:
        first, last = math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)
        marks = [10.0**power for power in range(first, last + 1)]
    else:
        marks = ticks(0.0, high)
    scale = math.log10 if logarithmic else float
    begin, end = scale(marks[0]), scale(marks[-1])

    def at(value: float) -> float:
        return LEFT + (scale(value) - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    row, height = 44, TOP + 44 * len(shown) + BOTTOM
    parts = [
        Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(
            at(mark), TOP, height - BOTTOM
        )
        for mark in marks
    ]
    parts += [_tick_x(mark, at(mark), height) for mark in marks]
    parts.append(_x_name(x_name, height))
    for index, box in enumerate(shown):
        parts.append(_box(box, at, TOP + index * row))
    return _svg(id, title, f"5, 25, 50, 75 and 95% quantiles of {x_name}; in the table below.", parts, height)


def _drawn(one: Series, at: Callable[[float, float], tuple[float, float]]) -> Markup:
    points = [(*at(x, y), x, y) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(y)]
    colour = one.colour % COLOURS
    parts = []
    if one.low and not one.whiskers:
        ends = [
            (at(x, low), at(x, high))
            for x, low, high in zip(one.x, one.low, one.high, strict=True)
            if math.isfinite(low) and math.isfinite(high)
        ]
        outline = [high for _, high in ends] + [low for low, _ in reversed(ends)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        parts.append(Markup('<polygon class="band" style="fill:var(--s{})" points="{}"/>').format(colour, path))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    dash = "2 4" if one.faint else DASHES[colour]
    line = Markup('<polyline class="line{}" style="stroke:var(--s{})" stroke-dasharray="{}" points="{}"/>')
    parts.append(line.format(" faint" if one.faint else "", colour, dash or "none", path))
    if one.whiskers:
        for x, low, high in zip(one.x, one.low, one.high, strict=True):
            (across, bottom), (_, top) = at(x, low), at(x, high)
            whisker = Markup('<path class="whisker" style="stroke:var(--s{})" d="{}"/>')
            d = f"M{across:.1f} {bottom:.1f}V{top:.1f}M{across - 4:.1f} {top:.1f}h8M{across - 4:.1f} {bottom:.1f}h8"
            parts.append(whisker.format(colour, d))
    if len(points) <= MOST_HINTS and not one.faint:
        kind = "mark" if len(points) <= MOST_MARKS else "hint"
        for x, y, at_x, value in points:
            circle = Markup('<circle class="{}" style="fill:var(--s{})" cx="{:.1f}" cy="{:.1f}" r="3">{}</circle>')
            hint = Markup("<title>{}, {}: {}</title>").format(one.name, number(at_x), number(value))
            parts.append(circle.format(kind, colour, x, y, hint))
    return Markup("").join(parts)


def _box(box: Box, at: Callable[[float], float], top: float) -> Markup:
    ends = [at(max(value, 1e-9)) for value in box.quantiles]
    middle = top + 26
    return Markup(
        '<g class="box" style="stroke:var(--s{c})"><title>{name}: {values}</title>'
        '<text class="label" x="{left}" y="{text_y}">{name}</text>'
        '<path d="M{a:.1f} {m}H{b:.1f}M{d:.1f} {m}H{e:.1f}M{a:.1f} {t}v12M{e:.1f} {t}v12"/>'
        '<rect style="fill:var(--s{c})" x="{b:.1f}" y="{r}" width="{w:.1f}" height="18"/>'
        '<path class="median" d="M{median:.1f} {r}v18"/></g>'
    ).format(
        c=box.colour % COLOURS, name=f"{box.name} (n = {box.n})", values=", ".join(map(number, box.quantiles)),
        left=LEFT, text_y=top + 12, a=ends[0], b=ends[1], d=ends[3], e=ends[4], m=middle, t=middle - 6, r=middle - 9,
        w=max(1.0, ends[3] - ends[1]), median=ends[2],
    )  # fmt: skip


def _grid_y(tick: float, y: float) -> Markup:
    return Markup(
        '<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/><text class="y" x="{}" y="{t:.1f}">{}</text>'
    ).format(LEFT, WIDTH - RIGHT, LEFT - 8, number(tick), y=y, t=y + 4)


def _tick_x(tick: float, x: float, height: float = HEIGHT) -> Markup:
    return Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(x, height - BOTTOM + 18, number(tick))


def _x_name(name: str, height: float = HEIGHT) -> Markup:
    return Markup('<text class="x name" x="{}" y="{}">{}</text>').format((LEFT + WIDTH - RIGHT) / 2, height - 6, name)


def _svg(id: str, title: str, description: str, parts: Sequence[Markup], height: float) -> Markup:
    return Markup(
        '<svg role="img" viewBox="0 0 {} {}" aria-labelledby="{id}-t {id}-d">'
        '<title id="{id}-t">{}</title><desc id="{id}-d">{}</desc>{}</svg>'
    ).format(WIDTH, height, title, description, Markup("").join(parts), id=id)
