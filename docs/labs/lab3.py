"""Lab 3, the four normalisations: how much a token weighs, and what that does.

    python docs/labs/lab3.py

makes the model, trains `lab3.yaml` with each `algorithm.normalize`, and writes runs/labs/lab3.svg and lab3.md. What it
shows is told in docs/labs/lab3.md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import lab
from lab import Run

CONDITIONS = {name: [f"algorithm.normalize={name}"] for name in ("rollout", "rollout_constant", "token", "sample")}


def main() -> None:
    options = lab.options(__doc__, seeds=[0, 1, 2])
    runs = lab.train("lab3", CONDITIONS, options)
    entropy = {id(run): run.surprise() for by_seed in runs.values() for run in by_seed.values()}
    weights = {name: weight_by_tries(list(by_seed.values())) for name, by_seed in runs.items()}
    pushes = {id(run): push(run) for by_seed in runs.values() for run in by_seed.values()}
    rows = []
    for name, by_seed in runs.items():
        each = list(by_seed.values())
        rows.append(
            [
                f"`{name}`",
                lab.spread([run.validation[-1][1] for run in each]),
                lab.spread([run.height for run in each]),
                lab.spread([entropy[id(run)][-1][1] for run in each]),
                lab.spread([tokens(run)[-1][1] for run in each], 1),
                lab.spread([statistics.fmean(map(tokens_of_a_reply, run.steps[-4:])) for run in each], 1),
                lab.spread([pushes[id(run)] for run in each], 2),
                f"{weights[name].get(6, 0.0):.1f}",
            ]
        )
    text = lab.table(
        [
            "normalisation",
            "validation at the end",
            "mean of all evaluations",
            "entropy at the end",
            "tokens a rollout at the end",
            "tokens a reply, last four steps",
            "weight times advantage, summed over a step",
            "weight of a rollout of six tries, in those of one try",
        ],
        rows,
    )
    for other in list(runs)[1:]:
        gain = lab.paired(runs, "rollout", other, lambda run: run.height)
        text += f"\n\nMean of all evaluations, rollout minus {other}: {gain}"
    drawn, axes = lab.figure(4)
    for color, (name, by_tries) in zip(lab.COLORS, weights.items(), strict=True):
        axes[0].plot(*zip(*sorted(by_tries.items()), strict=True), color=color, marker="o", label=name)
    axes[0].set_title("weight of a rollout, by its tries", fontsize=10)
    axes[0].set_xlabel("tries")
    axes[0].grid(alpha=0.25)
    axes[0].legend()
    lab.curves(axes[1], runs, lambda run: run.validation, "validation reward")
    lab.curves(axes[2], runs, lambda run: entropy[id(run)], "entropy, nats a token")
    lab.curves(axes[3], runs, tokens, "tokens sampled a rollout")
    lab.save("lab3", drawn, text, options)


def weight_by_tries(runs: list[Run]) -> dict[int, float]:
    """What all trained tokens of a rollout weigh together, by its number of samples, relative to one of one sample in
    the same step; the mean over all steps."""
    ratios = defaultdict(list)
    for run in runs:
        with run.store() as store:
            for step in run.steps:
                whole: dict[str, list[float]] = defaultdict(list)
                for sample in store.samples(step=step["step"]):
                    whole[sample.rollout_id].append(sample.weight * sum(sample.loss_mask))
                by_tries = defaultdict(list)
                for parts in whole.values():
                    by_tries[len(parts)].append(sum(parts))
                if 1 in by_tries:
                    one = statistics.fmean(by_tries[1])
                    for tries, values in by_tries.items():
                        ratios[tries].append(statistics.fmean(values) / one)
    return {tries: statistics.fmean(values) for tries, values in ratios.items()}


def push(run: Run) -> float:
    """Weight times advantage, summed over all trained tokens of a step, mean over the steps. Below 0, a step makes what
    was sampled less likely on the whole, whatever it was."""
    sums = []
    with run.store() as store:
        for step in run.steps:
            samples = store.samples(step=step["step"])
            sums.append(sum(sample.weight * sample.advantage * sum(sample.loss_mask) for sample in samples))
    return statistics.fmean(sums)


def tokens_of_a_reply(step: dict[str, Any]) -> float:
    """Here each sample is one reply."""
    return step["trained_tokens"] / max(1, step["samples_per_rollout"] * step["rollouts_trained"])


def tokens(run: Run) -> list[tuple[int, float]]:
    return [(step["step"], step["trained_tokens"] / max(1, step["rollouts_trained"])) for step in run.steps]


if __name__ == "__main__":
    main()
