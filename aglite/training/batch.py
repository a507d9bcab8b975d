"""Graded rollouts in, one training batch out: samples, advantages, weights, micro-batch plan and what to report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aglite.config import Recipe
from aglite.store.records import SampleRecord
from aglite.training.advantage import advantages, token_weights
from aglite.training.metrics import forest_stats, reward_stats, staleness_stats
from aglite.training.samples import Sample, build_samples, loss_bearing
from aglite.training.schedule import plan_micro_batches, split_mini_batches
from aglite.worker.io import pack_floats, pack_ids


@dataclass(slots=True)
class GradedRollout:
    """One rollout of a complete group. `reward` None: lost to infrastructure, so it has no place in the baseline."""

    rollout_id: str
    task_id: str
    reward: float | None


@dataclass(slots=True)
class TrainedRollout:
    """A rollout with its samples and, once known, its advantage and the weight of each sample's trained tokens."""

    rollout_id: str
    reward: float
    advantage: float
    samples: list[Sample]
    weights: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """What a step trains. `message` is what the model worker gets, or None when no row carries a gradient."""

    message: dict[str, Any] | None
    rollouts: list[TrainedRollout]
    fates: dict[str, str]
    metrics: dict[str, Any]

    def sample_records(self) -> list[SampleRecord]:
        """The samples as the store keeps them."""
        return [
            SampleRecord(
                rollout_id=rollout.rollout_id,
                calls=sample.calls,
                tokens=len(sample.input_ids),
                trained_tokens=sample.trained_tokens,
                advantage=rollout.advantage,
                weight=weight,
            )
            for rollout in self.rollouts
            for sample, weight in zip(rollout.samples, rollout.weights, strict=True)
        ]


def build_batch(
    groups: Sequence[Sequence[GradedRollout]],
    calls_of: Callable[[str], Sequence[Any]],
    recipe: Recipe,
    *,
    version: int,
    baseline: float | None,
    lr: float,
) -> Batch:
    """Turn complete groups into the batch of one step.

    `calls_of(rollout_id)` gives the recorded calls of a rollout's last attempt; `version` is the policy version in
    force; `baseline` is the running mean that `reinforce` subtracts. Rollouts without trained tokens, and those whose
    oldest trained token is more than `max_staleness` versions old, keep their place in the baseline only.
    """
    algorithm = recipe.algorithm
    rollouts: list[TrainedRollout] = []
    fates: dict[str, str] = {}
    calls_made = calls_trained = 0
    graded = [[member for member in group if member.reward is not None] for group in groups]
    per_group = advantages(algorithm.name, [[_reward(member) for member in group] for group in graded], baseline)
    for group, group_advantages in zip(graded, per_group, strict=True):
        for member, advantage in zip(group, group_advantages, strict=True):
            recorded = calls_of(member.rollout_id)
            calls = loss_bearing(recorded)
            calls_made, calls_trained = calls_made + len(recorded), calls_trained + len(calls)
            samples = build_samples(calls)
            if not samples:
                fates[member.rollout_id] = "baseline_only"
            elif version - min(sample.oldest_version for sample in samples) > algorithm.max_staleness:
                fates[member.rollout_id] = "stale"
            else:
                fates[member.rollout_id] = "trained"
                rollouts.append(TrainedRollout(member.rollout_id, _reward(member), advantage, samples))
    mini_batches = split_mini_batches(list(range(len(rollouts))), algorithm.updates_per_step) if rollouts else []
    rows: list[dict[str, Any]] = []
    plan: list[list[list[int]]] = []
    skipped = 0
    for members in mini_batches:
        first = len(rows)
        skipped += _weigh([rollouts[i] for i in members], members, rows, recipe, version)
        lengths = [len(row["ids"]) // 4 for row in rows[first:]]
        micro = plan_micro_batches(lengths, recipe.trainer.tokens_per_micro_batch, allow_longer=True) if lengths else []
        plan.append([[first + i for i in batch] for batch in micro])
    plan = [mini for mini in plan if mini]
    message = None
    if rows:
        message = {
            "rows": rows,
            "plan": plan,
            "temperature": recipe.sampling.train.temperature,
            "lr": lr,
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "correction": algorithm.correction,
            "correction_cap": algorithm.correction_cap,
            "kl": algorithm.kl,
        }
    rewards = [[_reward(member) for member in group] for group in graded]
    samples = [rollout.samples for rollout in rollouts]
    metrics: dict[str, Any] = {
        **reward_stats(rewards),
        **forest_stats(samples),
        **staleness_stats([sample for each in samples for sample in each], version),
        "rollouts": sum(len(group) for group in rewards),
        "rollouts_trained": len(rollouts),
        "rollouts_stale": sum(fate == "stale" for fate in fates.values()),
        "rollouts_without_tokens": sum(fate == "baseline_only" for fate in fates.values()),
        "rollouts_lost": sum(member.reward is None for group in groups for member in group),
        "samples_zero_advantage": skipped,
        "calls": calls_made,
        "calls_without_loss": calls_made - calls_trained,
    }
    return Batch(message, rollouts, fates, metrics)


def _reward(member: GradedRollout) -> float:
    assert member.reward is not None
    return member.reward


def _weigh(
    rollouts: list[TrainedRollout], numbers: list[int], rows: list[dict[str, Any]], recipe: Recipe, version: int
) -> int:
    """Weigh one mini-batch and append the rows that carry a gradient; returns how many carry none.

    A row whose advantage is 0 adds exactly 0 to the policy loss and its gradient, so it is counted in every
    denominator but not computed, unless a KL term gives it a gradient of its own. `fresh` marks the trained tokens
    that the weights now in force sampled: there, engine and trainer must agree on the log-probability.
    """
    counts = [[sample.trained_tokens for sample in rollout.samples] for rollout in rollouts]
    weights = token_weights(recipe.normalize, counts, constant=recipe.agent.limits.sampled_tokens)
    skipped = 0
    for number, rollout, per_sample in zip(numbers, rollouts, weights, strict=True):
        rollout.weights = per_sample
        for sample, weight in zip(rollout.samples, per_sample, strict=True):
            if rollout.advantage == 0 and recipe.algorithm.kl == 0:
                skipped += 1
                continue
            rows.append(
                {
                    "ids": pack_ids(sample.input_ids),
                    "mask": bytes(sample.loss_mask),
                    "fresh": bytes(v == version for v in sample.versions),
                    "logprobs": pack_floats(sample.logprobs),
                    "advantage": rollout.advantage,
                    "weight": weight,
                    "rollout": number,
                }
            )
    return skipped
