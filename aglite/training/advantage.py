"""How good a rollout was compared with its like, and how much each of its tokens weighs. Pure functions, no I/O.

Both are computed over *rollouts*, not samples: one rollout becomes an unknown number of samples, and how it was split
must not change what is learned from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

EPSILON = 1e-6
"""Added to the standard deviation that `grpo` divides by."""
DECAY = 0.9
"""Share of the old value in the running mean that `reinforce` subtracts."""


def advantages(name: str, groups: Sequence[Sequence[float]], baseline: float | None = None) -> list[list[float]]:
    """The advantage A_i of every graded rollout, in the shape of `groups`: one list of rewards r for each group of n.

    - `grpo`: A_i = (r_i - mean r) / (std r + 1e-6), std with n - 1 (Shao et al. 2024, DeepSeekMath);
    - `dr_grpo`: A_i = r_i - mean r (Liu et al. 2025, Understanding R1-Zero-Like Training);
    - `rloo`: A_i = r_i - mean of the other n - 1 rewards (Ahmadian et al. 2024, Back to Basics);
    - `reinforce`: A_i = r_i - `baseline`, the running mean of earlier steps' rewards (see `update_baseline`; Williams
      1992); in the first step, where there is none, the mean of all rewards given.

    Except with `reinforce`, a group of one has A = 0 and so has, exactly, a group of equal rewards. Give all graded
    rollouts of a group, before anything is filtered. Raises ValueError for a reward that is not finite.
    """
    for rewards in groups:
        for reward in rewards:
            if not math.isfinite(reward):
                raise ValueError(f"a reward of {reward} has no advantage")
    if name == "reinforce":
        everything = [reward for rewards in groups for reward in rewards]
        value = _mean(everything) if baseline is None and everything else baseline
        return [[reward - (value or 0.0) for reward in rewards] for rewards in groups]
    if name not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"no advantage is called {name!r}")
    return [_of_group(name, rewards) for rewards in groups]


def advantages_over_samples(
    name: str,
    groups: Sequence[Sequence[float]],
    samples: Sequence[Sequence[int]],
    baseline: float | None = None,
) -> list[list[float]]:
    """`advantages`, with every reward counted once for each of the samples that its rollout fell into.

    `samples[g][i]` is their number in rollout i of group g. A rollout of many samples then draws its group's baseline
    towards its own reward; one without any has A = 0 and no part in it.
    """
    repeated = [
        [reward for reward, number in zip(rewards, numbers, strict=True) for _ in range(number)]
        for rewards, numbers in zip(groups, samples, strict=True)
    ]
    found = []
    for values, numbers in zip(advantages(name, repeated, baseline), samples, strict=True):
        starts = accumulate(numbers, initial=0)
        found.append([values[start] if number else 0.0 for start, number in zip(starts, numbers, strict=False)])
    return found


def update_baseline(baseline: float | None, rewards: Sequence[float]) -> float | None:
    """The running mean after a step with these rewards: 0.9 * old + 0.1 * mean, or just the mean at first.

    A step without rewards leaves it as it is.
    """
    if not rewards:
        return baseline
    mean = _mean(rewards)
    return mean if baseline is None else DECAY * baseline + (1 - DECAY) * mean


def token_weights(
    normalize: str, trained_tokens: Sequence[Sequence[int]], constant: int | None = None
) -> list[list[float]]:
    """The weight of each trained token in the loss, for each sample of each rollout of a mini-batch.

    `trained_tokens[i][s]` is T_s, the number of trained tokens of sample s of rollout i; the result has the same shape.
    With N rollouts that have trained tokens, T_i trained tokens in rollout i and S samples:

    - `rollout`: 1 / (N T_i), so that every rollout counts the same;
    - `rollout_constant`: 1 / (N C) with `constant` C, so that a token counts the same in every rollout (Dr. GRPO);
    - `token`: 1 / sum_i T_i, so that long rollouts count more (DAPO);
    - `sample`: 1 / (S T_s), which depends on how rollouts were split into samples.

    Rollouts with advantage 0 belong in it: they are part of N and of the sums. A sample without trained tokens weighs 0
    and is not counted.
    """
    per_rollout = [sum(counts) for counts in trained_tokens]
    rollouts = sum(total > 0 for total in per_rollout)
    samples = sum(count > 0 for counts in trained_tokens for count in counts)
    everything = sum(per_rollout)
    if normalize not in ("rollout", "rollout_constant", "token", "sample"):
        raise ValueError(f"no normalisation is called {normalize!r}")
    if normalize == "rollout_constant" and not constant:
        raise ValueError("rollout_constant needs its constant, the recipe's limits.sampled_tokens")

    def weight(total: int, count: int) -> float:
        if not count:
            return 0.0
        match normalize:
            case "rollout":
                return 1 / (rollouts * total)
            case "rollout_constant":
                return 1 / (rollouts * (constant or 1))
            case "token":
                return 1 / everything
            case _:
                return 1 / (samples * count)

    return [
        [weight(total, count) for count in counts] for total, counts in zip(per_rollout, trained_tokens, strict=True)
    ]


def _of_group(name: str, rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    # Equal rewards do not differ from their mean; in floating point 0.1 three times would, by 1e-17 over 1e-6.
    if n < 2 or min(rewards) == max(rewards):
        return [0.0] * n
    mean = _mean(rewards)
    from_mean = [reward - mean for reward in rewards]
    if name == "dr_grpo":
        return from_mean
    if name == "rloo":
        return [difference * (n / (n - 1)) for difference in from_mean]  # r - (n mean - r)/(n - 1) = (r - mean) n/(n-1)
    std = math.hypot(*from_mean) / math.sqrt(n - 1)
    return [difference / (std + EPSILON) for difference in from_mean]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)
