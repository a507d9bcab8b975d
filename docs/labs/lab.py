"""What the labs share: they train a recipe under several conditions and seeds, and read the runs' databases."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from aglite.paths import RunDir
from aglite.store import Store

HERE = Path(__file__).resolve().parent
COLORS = ("#1f6fb2", "#d1495b", "#3b8f5a", "#8a5fb0")

Conditions = Mapping[str, Sequence[str]]
"""By name: the settings (`key.path=value`) that make a condition out of the recipe."""
Runs = dict[str, dict[int, "Run"]]
"""By condition and seed."""


@dataclass(frozen=True)
class Options:
    """What a lab's command line says."""

    runs: Path
    seeds: list[int]
    at_once: int
    settings: list[str]
    """For all conditions, from the command line."""

    @property
    def model(self) -> Path:
        return self.runs / "model"


def options(doc: str, *, seeds: Sequence[int], at_once: int = 2, mini: Sequence[str] = ()) -> Options:
    """Read a lab's command line; `mini` are the settings of `--mini`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/labs"), help="folder of model, runs and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--at-once", type=int, default=at_once, help="runs side by side, each with one thread")
    parser.add_argument("--mini", action="store_true", help="two small steps of one seed, to see that all works")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="key.path=value for all runs")
    given = parser.parse_args()
    small = ["trainer.steps=2", "algorithm.group_size=2", "algorithm.groups_per_step=2", "evaluation.tasks=2", *mini]
    settings = [*(small if given.mini else ()), *given.settings]
    return Options(given.runs.resolve(), [given.seeds[0]] if given.mini else given.seeds, given.at_once, settings)


def make_model(options: Options) -> None:
    """Make the labs' model, unless an earlier lab has."""
    if not (options.model / "model.safetensors").is_file():
        import warm

        warm.main(options.model)


@dataclass
class Run:
    """One finished run, read from its database."""

    folder: Path
    steps: list[dict[str, Any]] = field(init=False)
    """Metrics of each step, with `started_at` and `finished_at`."""
    validation: list[tuple[int, float]] = field(init=False)
    """(step, mean reward)"""

    def __post_init__(self) -> None:
        with self.store() as store:
            rows = [row for row in store.steps() if row["state"] != "rolled_back"]
            done = [row for row in store.evaluations() if row["state"] == "done"]
        times = ("step", "started_at", "finished_at")
        self.steps = [{**row["metrics"], **{key: row[key] for key in times}} for row in rows]
        self.validation = [(row["step"], row["result"]["mean"]) for row in done]

    @contextmanager
    def store(self):
        store = Store.open(RunDir(self.folder).db, readonly=True)
        try:
            yield store
        finally:
            store.close()

    @property
    def height(self) -> float:
        """Mean of the evaluations after training began: how high the learning curve is."""
        return statistics.fmean(value for step, value in self.validation if step)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric of the steps."""
        return [(step["step"], step[metric]) for step in self.steps]

    def surprise(self) -> list[tuple[int, float]]:
        """(step, entropy): the mean of -log p over all tokens sampled for the rollouts of a step, in nats. Where tokens
        are drawn from p itself, that is an unbiased estimate of its entropy, and it needs no token to be trained."""
        found = []
        with self.store() as store:
            for step in self.steps:
                rollouts = store.rollouts(step=step["step"], limit=10_000)
                logprobs = [value for row in rollouts for call in store.calls(row["id"]) for value in call.logprobs]
                found.append((step["step"], -statistics.fmean(logprobs) if logprobs else 0.0))
        return found


def train(lab: str, conditions: Conditions, options: Options) -> Runs:
    """Train every condition with every seed. Runs that are finished already are only read, interrupted ones go on."""
    make_model(options)
    wanted = [(name, seed) for seed in options.seeds for name in conditions]
    print(f"{len(wanted)} runs, {options.at_once} at once, load {os.getloadavg()[0]:.1f}", flush=True)

    def one(name: str, seed: int) -> Run:
        folder = options.runs / lab / f"{name.replace(', ', ' ').replace(' ', '-')}-{seed}"
        began = time.monotonic()
        _up(lab, folder, [*conditions[name], *options.settings, f"seed={seed}"], options)
        run = Run(folder)
        ends = f"validation {run.validation[0][1]:.3f} -> {run.validation[-1][1]:.3f}" if run.validation else ""
        load = f"load {os.getloadavg()[0]:.1f}"
        print(f"  {name}, seed {seed}: {ends}, {time.monotonic() - began:.0f} s, {load}", flush=True)
        return run

    with ThreadPoolExecutor(options.at_once) as pool:
        futures = {key: pool.submit(one, *key) for key in wanted}
        return {name: {seed: futures[name, seed].result() for seed in options.seeds} for name in conditions}


def _up(lab: str, folder: Path, settings: Iterable[str], options: Options) -> None:
    command = [sys.executable, "-m", "aglite", "up", str(HERE / f"{lab}.yaml"), "--headless", "--dir", str(folder)]
    for setting in [f"model={options.model}", f"agent.env.CLAIMS={folder}.claims", *settings]:
        command += ["--set", setting]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    root = str(HERE.parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    with log.open("a") as file:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}; the end of {log}:\n{log.read_text()[-2000:]}"
        )


# numbers


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation (n - 1)."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def paired(runs: Runs, one: str, other: str, value: Callable[[Run], float]) -> str:
    """How much `value` is larger under `one` than under `other`, seed by seed: mean ± standard error (n seeds, those in
    which it is larger)."""
    differences = [value(runs[one][seed]) - value(runs[other][seed]) for seed in runs[one]]
    n = len(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else 0.0
    return f"{statistics.fmean(differences):+.3f} ± {error:.3f} ({sum(d > 0 for d in differences)} of {n} seeds)"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


# results


def curves(axes: Axes, runs: Runs, of: Callable[[Run], Sequence[tuple[float, float]]], label: str) -> None:
    """A thick line for each condition's mean over the seeds, a thin one for each seed."""
    for color, (name, by_seed) in zip(COLORS, runs.items(), strict=False):
        lines = [of(run) for run in by_seed.values()]
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=color, linewidth=0.6, alpha=0.45)
        means = [(points[0][0], statistics.fmean(y for _, y in points)) for points in zip(*lines, strict=False)]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=2.2, label=name)
    axes.set_xlabel("step")
    axes.set_title(label, fontsize=10)
    axes.grid(alpha=0.25)


def figure(panels: int) -> tuple[Any, list[Axes]]:
    drawn, axes = plt.subplots(1, panels, figsize=(4.2 * panels, 3.4), layout="constrained", squeeze=False)
    return drawn, list(axes[0])


def save(lab: str, drawn: Any, text: str, options: Options) -> None:
    """Print the text, and put it and the plot beside the runs."""
    plot, page = options.runs / f"{lab}.svg", options.runs / f"{lab}.md"
    matplotlib.rcParams["svg.hashsalt"] = lab
    drawn.savefig(plot, metadata={"Date": None})
    page.write_text(text + "\n")
    print(f"\n{text}\n\nplot: {plot}")
