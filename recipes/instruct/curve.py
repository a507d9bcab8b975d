"""Runs the recipe with several seeds and prints the table of its README: `python recipes/instruct/curve.py`.

A run that is finished already is only read, an interrupted one goes on. What follows `--` goes to `aglite up`:
`python recipes/instruct/curve.py --seeds 0 1 2 -- --steps 10`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from aglite.store import Store

RECIPE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run directories")
    parser.add_argument("options", nargs="*", help="options of aglite up, after --")
    arguments = parser.parse_args()
    runs = {}
    for seed in arguments.seeds:
        folder = arguments.runs / f"instruct-seed-{seed}"
        command = [sys.executable, "-m", "aglite", "up", str(RECIPE), "--headless", "--dir", str(folder)]
        done = subprocess.run([*command, "--set", f"seed={seed}", *arguments.options])
        if done.returncode:
            raise SystemExit(done.returncode)
        runs[seed] = read(folder / "aglite.db")
    print(summary(runs), curve(runs), sep="\n\n")


def read(database: Path) -> dict[str, Any]:
    """What the tables need of one run: evaluations by step, training reward by step, minutes."""
    store = Store.open(database, readonly=True)
    try:
        evaluations = [row for row in store.evaluations() if row["state"] == "done"]
        steps = [row for row in store.steps() if row["state"] != "rolled_back"]
    finally:
        store.close()
    if len(evaluations) < 2:
        raise SystemExit(f"{database}: needs an evaluation before and one after training, has {len(evaluations)}")
    return {
        "before": evaluations[0]["result"],
        "after": evaluations[-1]["result"],
        "rewards": {row["step"]: row["metrics"]["reward_mean"] for row in steps},
        "minutes": (evaluations[-1]["finished_at"] - evaluations[0]["started_at"]) / 60,
    }


def summary(runs: dict[int, dict[str, Any]]) -> str:
    """Validation before and after, as a Markdown table. The rise's standard error takes both means as independent."""
    lines = [
        "| seed | before | after | rise | rise in standard errors | minutes |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for seed, run in runs.items():
        before, after = run["before"], run["after"]
        rise = after["mean"] - before["mean"]
        error = (before["stderr"] ** 2 + after["stderr"] ** 2) ** 0.5
        cells = [f"{seed}", *(f"{result['mean']:.2f} ± {result['stderr']:.2f}" for result in (before, after))]
        cells += [f"{rise:+.2f}", f"{rise / error:.1f}" if error else "-", f"{run['minutes']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    kinds = sorted({kind for run in runs.values() for kind in run["after"]["by_kind"]})
    lines += ["", f"| seed | {' | '.join(kinds)} |", f"| ---: |{' ---: |' * len(kinds)}"]
    for seed, run in runs.items():
        cells = [f"{run['before']['by_kind'][kind]:.2f} → {run['after']['by_kind'][kind]:.2f}" for kind in kinds]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curve(runs: dict[int, dict[str, Any]]) -> str:
    """Mean reward of the training rollouts in each step, a row per seed."""
    steps = sorted({step for run in runs.values() for step in run["rewards"]})
    lines = [f"| step | {' | '.join(map(str, steps))} |", f"| --- |{' ---: |' * len(steps)}"]
    for seed, run in runs.items():
        cells = [f"{run['rewards'][step]:.2f}" if step in run["rewards"] else "" for step in steps]
        lines.append(f"| seed {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
