"""The figures of a report: which series are drawn, and the same numbers as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from aglite.report.read import Run
from aglite.report.svg import Box, Series, box_chart, line_chart, number

TOLD = {
    *("reward_mean", "reward_std", "entropy", "kl_rollout", "kl_ref"),
    *("samples_per_rollout", "samples_per_rollout_max"),
}
"""Metrics that have a figure of their own."""

MOST_ROWS = 200
"""Rows of a table; of more steps every second, third, ... is in it."""


@dataclass(slots=True)
class Figure:
    """A chart with its numbers: `rows` under `columns`, `note` on how to read it."""

    id: str
    title: str
    note: str
    chart: Markup
    columns: list[str]
    rows: list[list[str]]


def figures(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """All that have something to show, in the order of a report."""
    alone = len(runs) == 1
    found = [
        _reward(runs, labels, alone),
        _validation(runs, labels),
        _pass_at_k(runs, labels),
        _metric(runs, labels, "entropy", "Entropy", "Of the policy on trained tokens, in nats a token.", ("entropy",)),
        _metric(
            runs, labels, "kl", "KL divergence",
            "In nats a token: of the policy to the one that sampled the tokens and, dotted, to the model that the run "
            "began with, where the recipe holds it.",
            ("kl_rollout", "kl_ref"), zero=True,
        ),
        _metric(
            runs, labels, "rows", "Rows per rollout",
            "Samples that a rollout's calls became: 1 is a conversation that was only continued. Dotted: the most.",
            ("samples_per_rollout", "samples_per_rollout_max"), zero=True,
        ),
        _durations(runs, labels),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None and figure.chart]


def other_measures(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """Everything else that was measured at each step and is not the same all the time, by name."""
    names: dict[str, set[float]] = {}
    for run in runs:
        for _, values in run.measured:
            for name, value in values.items():
                if name not in TOLD and math.isfinite(value):
                    names.setdefault(name, set()).add(value)
    chosen = [name for name, values in sorted(names.items()) if len(values) > 1]
    found = [_metric(runs, labels, f"m{place}", name, "", (name,)) for place, name in enumerate(chosen)]
    return [figure for figure in found if figure is not None]


def _reward(runs: Sequence[Run], labels: Sequence[str], alone: bool) -> Figure | None:
    series = []
    for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
        points = [(s["step"], s["metrics"]["reward_mean"], s["metrics"].get("reward_std", 0.0)) for s in run.steps]
        if not points:
            continue
        x, y, spread = zip(*points, strict=True)
        band = [(mean - std, mean + std) for mean, std in zip(y, spread, strict=True)] if alone else []
        series.append(Series(label, colour, x, y, [low for low, _ in band], [high for _, high in band]))
    note = "Mean reward of the rollouts that a step trained on" + (
        ", and one standard deviation of them to either side." if alone else "."
    )
    return _figure("reward", "Training reward", note, series, "step")


def _validation(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    series = []
    for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
        points = [(row["step"], *_of(row["result"])) for row in run.evaluations]
        if points:
            x, y, low, high = zip(*points, strict=True)
            series.append(Series(label, colour, x, y, low, high, whiskers=True))
    return _figure(
        "validation",
        "Validation reward",
        "On held-out tasks, the same with the same seeds each time. Whiskers: 95% interval over tasks (normal).",
        series,
        "step",
    )


def _of(interval: dict[str, Any]) -> tuple[float, float, float]:
    mean, stderr = interval["mean"], interval.get("stderr", 0.0)
    return mean, interval.get("low", mean - 1.96 * stderr), interval.get("high", mean + 1.96 * stderr)


def _pass_at_k(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    """pass@k over k: of the last evaluation of each run, and of the first where there is one run only."""
    series = []
    for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
        chosen = [(f"{label}, step {row['step']}", row) for row in run.evaluations[-1:]]
        if len(runs) == 1 and len(run.evaluations) > 1:
            chosen.append((f"{label}, step {run.evaluations[0]['step']}", run.evaluations[0]))
        for place, (name, row) in enumerate(chosen):
            ks = sorted(int(key[5:]) for key in row["result"] if key.startswith("pass@"))
            if len(ks) < 2:
                continue
            values = [_of(row["result"][f"pass@{k}"]) for k in ks]
            y, low, high = zip(*values, strict=True)
            series.append(Series(name, colour + place, ks, y, low, high, whiskers=True))
    return _figure(
        "pass",
        "pass@k",
        "Chance that at least one of k rollouts solves a validation task (unbiased estimate). Whiskers: 95% interval "
        "over tasks (Wilson).",
        series,
        "k",
        zero=True,
    )


def _metric(
    runs: Sequence[Run],
    labels: Sequence[str],
    id: str,
    title: str,
    note: str,
    names: Sequence[str],
    zero: bool = False,
) -> Figure | None:
    """The metrics `names` of each step; the second is drawn as companion of the first."""
    series = []
    for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for place, name in enumerate(names):
            points = [(step, values[name]) for step, values in run.measured if name in values]
            if points and (place == 0 or any(value for _, value in points)):
                x, y = zip(*points, strict=True)
                series.append(Series(label if place == 0 else f"{label}, {name}", colour, x, y, faint=place > 0))
    return _figure(id, title, note, series, "step", zero)


def _durations(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    boxes, rows = [], []
    for colour, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for split, of in run.durations.items():
            if not of["n"]:
                continue
            name = f"{label}, {'training' if split == 'train' else 'validation'}"
            boxes.append(Box(name, colour, of["quantiles"], of["n"]))
            rows.append([name, str(of["n"]), *map(number, of["quantiles"]), number(of["longest"])])
    chart = box_chart("durations", "Rollout durations", boxes, "seconds")
    note = "Seconds from launch to graded end, held time included. The box is the middle half, its bar the median."
    columns = ["rollouts", "number", "5%", "25%", "50%", "75%", "95%", "longest"]
    return Figure("durations", "Rollout durations", note, chart, columns, rows) if rows else None


def _figure(id: str, title: str, note: str, series: Sequence[Series], x_name: str, zero: bool = False) -> Figure | None:
    if not series:
        return None
    chart = line_chart(id, title, series, x_name, zero)
    columns, cells = [x_name], []
    for one in series:
        columns.append(one.name)
        if one.low:
            columns.append("interval")
        cells.append(_cells(one))
    places = sorted({x for one in series for x in one.x})
    every = -(-len(places) // MOST_ROWS)
    if every > 1:
        note = f"{note} The table has every {every}th {x_name}.".strip()
    rows = []
    for x in places[::every]:
        row = [number(x)]
        for one, of in zip(series, cells, strict=True):
            row += of.get(x, [""] * (2 if one.low else 1))
        rows.append(row)
    return Figure(id, title, note, chart, columns, rows)


def _cells(one: Series) -> dict[float, list[str]]:
    """What a series says at each x; the last word counts where it says several things."""
    if not one.low:
        return {x: [number(y)] for x, y in zip(one.x, one.y, strict=True)}
    return {
        x: [number(y), f"{number(low)} to {number(high)}"]
        for x, y, low, high in zip(one.x, one.y, one.low, one.high, strict=True)
    }
