"""Lab 2, advantage over rollouts or over samples, when rollouts fall into unequal numbers of samples.

    python docs/labs/lab2.py

makes the model, trains `lab2.yaml` with advantage and weights over rollouts and over samples, and writes
runs/labs/lab2.svg and lab2.md. What it shows is told in docs/labs/lab2.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import lab
from lab import Run

CONDITIONS = {
    "rollouts": ["algorithm.advantage_over=rollouts", "algorithm.normalize=rollout"],
    "samples": ["algorithm.advantage_over=samples", "algorithm.normalize=sample"],
}


def main() -> None:
    options = lab.options(__doc__, seeds=[0, 1, 2, 3, 4])
    runs = lab.train("lab2", CONDITIONS, options)
    entropy = {id(run): run.surprise() for by_seed in runs.values() for run in by_seed.values()}

    def roughness(run: Run) -> float:
        """Mean change of the entropy from one step to the next, in nats."""
        values = [value for _, value in entropy[id(run)]]
        return statistics.fmean(abs(b - a) for a, b in pairwise(values))

    measures: dict[str, Callable[[Run], float]] = {
        "validation at the end": lambda run: run.validation[-1][1],
        "validation, mean of all evaluations": lambda run: run.height,
        "entropy at the end, nats a token": lambda run: entropy[id(run)][-1][1],
        "change of entropy from step to step": roughness,
        "gradient norm, largest over its median": jumps,
    }
    rows = [
        [name, *(lab.spread([of(run) for run in runs[n].values()]) for n in runs), lab.paired(runs, *runs, of)]
        for name, of in measures.items()
    ]
    text = lab.table(["", *runs, "difference, paired by seed"], rows)
    split = [
        value for by_seed in runs.values() for run in by_seed.values() for _, value in run.curve("samples_per_rollout")
    ]
    text += f"\n\nSamples per rollout: {min(split):.2f} to {max(split):.2f} on average of a step, 1 to 6 in a rollout."
    drawn, axes = lab.figure(3)
    lab.curves(axes[0], runs, lambda run: run.validation, "validation reward")
    lab.curves(axes[1], runs, lambda run: entropy[id(run)], "entropy, nats a token")
    lab.curves(axes[2], runs, lambda run: run.curve("samples_per_rollout"), "samples per rollout")
    axes[0].legend()
    lab.save("lab2", drawn, text, options)


def jumps(run: Run) -> float:
    norms = [step["grad_norm"] for step in run.steps if "grad_norm" in step]
    return max(norms) / statistics.median(norms) if norms else 0.0


if __name__ == "__main__":
    main()
