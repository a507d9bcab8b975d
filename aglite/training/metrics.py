"""Numbers that say how a step or an evaluation went. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from aglite.training.samples import Sample
from aglite.units import BROKEN

Z95 = statistics.NormalDist().inv_cdf(0.975)
"""Half the width of a 95% interval, in standard errors."""


FORKS = ("first", "new_thread", *BROKEN)
"""Why a call's prompt does not begin with the tokens recorded before it."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k rollouts solves a task of which c of n did: 1 - C(n - c, k) / C(n, k).

    The unbiased estimate of Chen et al. 2021 (Evaluating Large Language Models Trained on Code). Raises ValueError
    unless 0 <= c <= n and 1 <= k <= n: from n rollouts nothing is known about more than n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {c} solved of {n} rollouts")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean over tasks with its standard error and 95% interval: {mean, stderr, low, high, n}.

    `values` holds one number a task (its mean reward, its pass@k): tasks are the independent draws, not rollouts.
    stderr = s / sqrt(n), s with n - 1; the interval is mean +- 1.96 stderr. One value has stderr 0, none mean 0.
    """
    n = len(values)
    mean = statistics.fmean(values) if n else 0.0
    stderr = statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return {"mean": mean, "stderr": stderr, "low": mean - Z95 * stderr, "high": mean + Z95 * stderr, "n": n}


def reward_stats(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Over all graded rollouts of a step: {reward_mean, reward_std (n - 1), groups, zero_advantage_groups}.

    Groups whose rewards are all equal teach nothing; with REINFORCE, whose baseline is not the group's, they do.
    """
    rewards = [reward for group in groups for reward in group]
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "groups": len(groups),
        "zero_advantage_groups": sum(len(set(group)) < 2 for group in groups),
    }


def forest_stats(rollouts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """How well the calls of rollouts merged into samples; `rollouts` holds the samples of each.

    - `samples`, `samples_per_rollout`, `samples_per_rollout_max`;
    - `merge_rate`: share of trained calls that needed no sample of their own, 1 - samples / calls;
    - `encoded_tokens`, `trained_tokens` and `encoded_per_trained`: what the trainer computes for a token it trains.
    """
    per_rollout = [len(samples) for samples in rollouts]
    samples = [sample for each in rollouts for sample in each]
    calls = sum(trained for sample in samples for _, trained in sample.calls)
    encoded = sum(len(sample.input_ids) for sample in samples)
    trained_tokens = sum(sample.trained_tokens for sample in samples)
    return {
        "samples": len(samples),
        "samples_per_rollout": len(samples) / len(rollouts) if rollouts else 0.0,
        "samples_per_rollout_max": max(per_rollout, default=0),
        "merge_rate": 1 - len(samples) / calls if calls else 0.0,
        "encoded_tokens": encoded,
        "trained_tokens": trained_tokens,
        "encoded_per_trained": encoded / trained_tokens if trained_tokens else 0.0,
    }


def row_stats(samples: Sequence[Sample], causes: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """Why there are as many rows as there are: {rows_by_cause, encoded_by_cause}, samples and their tokens by the fork
    cause (`causes`, by call id) of the first call that is trained in them.

    `branch`: that call continues recorded tokens, as another one did before it (several replies to one prompt).
    """
    rows: Counter[str] = Counter()
    encoded: Counter[str] = Counter()
    for sample in samples:
        first = next(call_id for call_id, trained in sample.calls if trained)
        cause = causes[first] or "branch"
        rows[cause] += 1
        encoded[cause] += len(sample.input_ids)
    names = (*FORKS, "branch")
    return {
        "rows_by_cause": {name: rows[name] for name in names},
        "encoded_by_cause": {name: encoded[name] for name in names},
    }


def fork_stats(causes: Iterable[str]) -> dict[str, int]:
    """How many calls continue the recorded tokens (`continued`, cause ''), and how many fork for each cause."""
    counts = Counter(cause or "continued" for cause in causes)
    return {name: counts[name] for name in ("continued", *FORKS)}


def staleness_stats(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How old the trained tokens are: {staleness_mean, staleness_p95, staleness_max}, in policy versions.

    A token's staleness is `version`, the one in force at training, minus the one that sampled it. p95 is the smallest
    number that at least 95% of the tokens do not exceed.
    """
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.versions)
    del counts[-1]  # tokens without loss
    ages = sorted((version - sampled, number) for sampled, number in counts.items())
    total = sum(number for _, number in ages)
    if not total:
        return {"staleness_mean": 0.0, "staleness_p95": 0, "staleness_max": 0}
    seen, p95 = 0, ages[-1][0]
    for age, number in ages:
        seen += number
        if seen >= 0.95 * total:
            p95 = age
            break
    mean = sum(age * number for age, number in ages) / total
    return {"staleness_mean": mean, "staleness_p95": p95, "staleness_max": ages[-1][0]}
