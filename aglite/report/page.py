"""The report's page: facts of each run in columns, figures, the phases, what it cost, what went wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aglite
from aglite import units
from aglite.errors import AgliteError
from aglite.export import whole_file
from aglite.paths import RunDir
from aglite.report.figures import figures, other_measures
from aglite.report.read import Run, read_run
from aglite.report.svg import COLOURS, DASHES, number

PHASES = ("rollout", "training", "evaluating", "draining", "syncing", "starting", "sleeping", "paused")
"""In the order of the page's colours for them."""

MOST_BLOCKS = 400
"""Blocks of a phase timeline; more than that are drawn as this many slices, each divided as its time was."""

Rows = list[tuple[str, list[str]]]
"""Facts: a name and what each run says."""


def write_report(run_dirs: Sequence[RunDir], out: Path) -> int:
    """Write one HTML file about these runs, in this order; returns how many figures it has. Raises AgliteError."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    page, count = render(runs, time.time())
    try:
        with whole_file(out) as file:
            file.write(page.encode("utf-8", errors="replace"))  # half characters of agents are no UTF-8
    except OSError as error:
        raise AgliteError(f"{out} could not be written: {error.strerror or error}", "choose another --out") from error
    return count


def render(runs: Sequence[Run], now: float) -> tuple[str, int]:
    """The page as HTML, and how many figures it has. Everything in it is escaped."""
    import jinja2

    labels = labels_of(runs)
    drawn, others = figures(runs, labels), other_measures(runs, labels)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        title=" · ".join(dict.fromkeys(run.name for run in runs)),
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
        version=aglite.__version__,
        runs=list(zip(runs, labels, range(len(runs)), strict=True)),
        labels=labels,
        colours=COLOURS,
        dashes=DASHES,
        facts=facts(runs),
        figures=drawn,
        others=others,
        timelines=[timeline(run) for run in runs],
        phases=[phase for phase in PHASES if any(phase in run.seconds for run in runs)],
        phase_colour={phase: place for place, phase in enumerate(PHASES)},
        costs=costs(runs),
        causes=bars([run.causes for run in runs]),
        differences=differences(runs),
        clock=units.clock,
    )
    return page, len(drawn) + len(others)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """What each run is called: its name, with its folder's where the name is not enough, numbered where neither is."""
    names = Counter(run.name for run in runs)
    labels = [run.name if names[run.name] == 1 else Path(run.folder).resolve().name for run in runs]
    same, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        if same[label] > 1:
            seen[label] += 1
            labels[place] = f"{label} ({seen[label]})"
    return labels


def facts(runs: Sequence[Run]) -> Rows:
    """What is told of each run at the top."""
    rows = {
        "model": [run.model for run in runs],
        "state": [run.state for run in runs],
        "folder": [run.folder for run in runs],
        "started": [_date(run.started_at) for run in runs],
        "steps": [f"{run.steps[-1]['step'] if run.steps else 0} of {run.wanted_steps}" for run in runs],
        "time at work": [units.clock(sum(run.seconds.values())) for run in runs],
        "training reward, first and last step": [_ends(run) for run in runs],
        "validation before": [_interval(run.evaluations[0]["result"]) if run.evaluations else "–" for run in runs],
        "validation last": [_interval(run.evaluations[-1]["result"]) if run.evaluations else "–" for run in runs],
        "gain, task by task": [_gain(run) for run in runs],
        "best checkpoint": [f"{run.best['path']}" if run.best else "–" for run in runs],
        "rollouts": [_queue(run.queue) for run in runs],
        **_by_kind(runs),
        "versions": [", ".join(f"{name} {version}" for name, version in run.versions.items()) for run in runs],
    }
    return [(name, values) for name, values in rows.items() if any(value not in ("", "–") for value in values)]


def costs(runs: Sequence[Run]) -> Rows:
    """Time by phase, and tokens."""
    rows: dict[str, list[str]] = {}
    for phase in PHASES:
        if any(phase in run.seconds for run in runs):
            rows[f"{phase}, seconds"] = [_share(run.seconds.get(phase, 0.0), run.seconds) for run in runs]
    names = {"calls": "calls", "prompt_tokens": "prompt tokens", "sampled_tokens": "sampled tokens"}
    for key, name in names.items():
        for split, of in (("train", "training"), ("val", "validation")):
            rows[f"{name}, {of}"] = [f"{run.tokens.get(split, {}).get(key, 0):,}" for run in runs]
    for key, name in (("trained_tokens", "trained tokens"), ("computed_tokens", "tokens computed to train them")):
        sums = [sum(step["metrics"].get(key, 0) for step in run.steps) for run in runs]
        if any(sums):
            rows[name] = [f"{value:,.0f}" for value in sums]
    return list(rows.items())


def timeline(run: Run) -> list[dict[str, Any]]:
    """Blocks of the phases in percent of the whole: {phase, left, width, hint}."""
    whole = sum(phase["seconds"] for phase in run.phases)
    if not whole:
        return []
    blocks = run.phases if len(run.phases) <= MOST_BLOCKS else _slices(run.phases, whole)
    return [
        {
            "phase": block["phase"],
            "left": round(100 * block["start"] / whole, 4),
            "width": round(100 * block["seconds"] / whole, 4),
            "hint": f"{block['phase']}: {units.clock(block['seconds'])}, from {units.clock(block['start'])}",
        }
        for block in blocks
    ]


def _slices(phases: Sequence[dict[str, Any]], whole: float) -> list[dict[str, Any]]:
    """The time in MOST_BLOCKS // 4 equal slices, in each the phases one after the other with their share of it."""
    count = MOST_BLOCKS // 4
    each = whole / count
    shares: list[Counter[str]] = [Counter() for _ in range(count)]
    for phase in phases:
        start, end = phase["start"], phase["start"] + phase["seconds"]
        while start < end:
            place = min(int(start / each + 1e-9), count - 1)
            stop = min(end, (place + 1) * each) if place < count - 1 else end
            shares[place][phase["phase"]] += stop - start
            start = stop
    blocks = []
    for place, share in enumerate(shares):
        start = place * each
        for name in PHASES:
            if share[name]:
                blocks.append({"phase": name, "start": start, "seconds": share[name]})
                start += share[name]
    return blocks


def bars(counts: Sequence[dict[str, int]]) -> list[tuple[str, list[tuple[int, float]]]]:
    """Counts of each run by name, the largest first: [(name, [(count, percent of the largest), ...])]."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    most = max((count for one in counts for count in one.values()), default=1)
    return [
        (units.plain(name), [(one.get(name, 0), 100 * one.get(name, 0) / most) for one in counts])
        for name, _ in total.most_common()
    ]


def differences(runs: Sequence[Run]) -> Rows:
    """Settings that are not the same in all runs; of a single run all of them."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [(name, [_setting(run.settings.get(name, "–")) for run in runs]) for name in names]
    return rows if len(runs) == 1 else [(name, values) for name, values in rows if len(set(values)) > 1]


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else "–" if value is None else str(value)


def _date(at: float | None) -> str:
    return "–" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _ends(run: Run) -> str:
    if not run.steps:
        return "–"
    return " → ".join(number(run.steps[place]["metrics"]["reward_mean"]) for place in (0, -1))


def _interval(result: dict[str, Any]) -> str:
    interval = f" ({result['low']:.3f} to {result['high']:.3f})" if "low" in result else ""
    return f"{result['mean']:.3f}{interval}, {result['n']} tasks"


def _gain(run: Run) -> str:
    gain = run.gain
    return "–" if gain is None else f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})"


def _queue(queue: dict[str, int]) -> str:
    return ", ".join(f"{queue[state]:,} {state}" for state in units.QUEUE if queue.get(state)) or "none"


def _by_kind(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Of the last evaluation, the kinds of tasks apart."""
    last = [run.evaluations[-1]["result"]["by_kind"] if run.evaluations else {} for run in runs]
    kinds = dict.fromkeys(kind for by_kind in last for kind in by_kind)
    return {f"validation last, {kind}": [number(of[kind]) if kind in of else "–" for of in last] for kind in kinds}


def _share(seconds: float, of: dict[str, float]) -> str:
    whole = sum(of.values())
    return f"{seconds:,.0f} ({seconds / whole:.0%})" if whole else "0"
