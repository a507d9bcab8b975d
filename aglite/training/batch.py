"""Graded rollouts in, one training batch out: samples, advantages, weights, micro-batch plan and what to report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aglite.config import Recipe
from aglite.store.records import SampleRecord
from aglite.training.advantage import advantages, advantages_over_samples, token_weights
from aglite.training.metrics import forest_stats, fork_stats, reward_stats, row_stats, staleness_stats
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


@dataclass(slots=True)
class Ledger:
    """Where every token that the graded rollouts of a step sampled went: nothing is dropped without a column here."""

    sampled: int = 0
    no_loss: int = 0
    """Of calls whose reply never reached the agent, and of unused copies of retries."""
    set_aside: int = 0
    """Of groups that others took the place of (dynamic sampling)."""
    stale: int = 0
    zero_advantage: int = 0
    """In every denominator, but not computed: they would add exactly 0."""
    computed: int = 0
    """In the rows that the model worker gets."""

    def check(self) -> dict[str, int]:
        """The columns. Raises RuntimeError if they do not add up: tokens would be lost without anybody knowing."""
        columns = asdict(self)
        if self.sampled != sum(columns.values()) - self.sampled:
            raise RuntimeError(f"the tokens of a step do not add up: {columns}")
        return columns


def build_batch(
    groups: Sequence[Sequence[GradedRollout]],
    calls_of: Callable[[str], Sequence[Any]],
    recipe: Recipe,
    *,
    version: int,
    baseline: float | None,
    lr: float,
    set_aside: Sequence[Sequence[GradedRollout]] = (),
) -> Batch:
    """Turn complete groups into the batch of one step.

    `calls_of(rollout_id)` gives the recorded calls of a rollout's last attempt; `version` is the policy version in
    force; `baseline` is the running mean that `reinforce` subtracts. Rollouts without trained tokens, and those whose
    oldest trained token is more than `max_staleness` versions old, keep their place in the baseline only. Groups that
    were `set_aside` are part of what is reported, and of nothing else.
    """
    algorithm = recipe.algorithm
    rollouts: list[TrainedRollout] = []
    fates: dict[str, str] = {}
    ledger, seen = Ledger(), _Calls()
    graded = [[member for member in group if member.reward is not None] for group in groups]
    aside = [[member for member in group if member.reward is not None] for group in set_aside]
    forests = {
        member.rollout_id: build_samples(seen.take(calls_of(member.rollout_id), ledger))
        for group in graded
        for member in group
    }
    rewards = [[_reward(member) for member in group] for group in graded]
    if algorithm.advantage_over == "samples":
        numbers = [[len(forests[member.rollout_id]) for member in group] for group in graded]
        per_group = advantages_over_samples(algorithm.name, rewards, numbers, baseline)
    else:
        per_group = advantages(algorithm.name, rewards, baseline)
    for group, group_advantages in zip(graded, per_group, strict=True):
        for member, advantage in zip(group, group_advantages, strict=True):
            samples = forests[member.rollout_id]
            if not samples:
                fates[member.rollout_id] = "baseline_only"
            elif version - min(sample.oldest_version for sample in samples) > algorithm.max_staleness:
                fates[member.rollout_id] = "stale"
                ledger.stale += sum(sample.trained_tokens for sample in samples)
            else:
                fates[member.rollout_id] = "trained"
                rollouts.append(TrainedRollout(member.rollout_id, _reward(member), advantage, samples))
    for member in (member for group in aside for member in group):
        fates[member.rollout_id] = "set_aside"
        ledger.set_aside += sum(len(call.response_ids) for call in seen.take(calls_of(member.rollout_id), ledger))
    rows, plan = _rows(rollouts, recipe, version, ledger)
    message = {"rows": rows, "plan": plan, "lr": lr, **loss_settings(recipe)} if rows else None
    rewards += [[_reward(member) for member in group] for group in aside]
    samples = [rollout.samples for rollout in rollouts]
    flat = [sample for each in samples for sample in each]
    metrics: dict[str, Any] = {
        **reward_stats(rewards),
        **forest_stats(samples),
        **row_stats(flat, seen.causes),
        **staleness_stats(flat, version),
        "rollouts": sum(len(group) for group in rewards),
        "rollouts_trained": len(rollouts),
        "rollouts_stale": sum(fate == "stale" for fate in fates.values()),
        "rollouts_without_tokens": sum(fate == "baseline_only" for fate in fates.values()),
        "rollouts_lost": sum(member.reward is None for group in (*groups, *set_aside) for member in group),
        "groups_short": sum(len(group) < algorithm.group_size for group in graded),
        "groups_set_aside": len(aside),
        "samples_zero_advantage": len(flat) - len(rows),
        "ledger": ledger.check(),
        "tokens_per_rollout": ledger.sampled / len(fates) if fates else 0.0,
        "calls": len(seen.causes),
        "calls_without_loss": seen.without_loss,
        "calls_constrained": seen.constrained,
        "forks": fork_stats(seen.causes.values()),
    }
    return Batch(message, rollouts, fates, metrics)


@dataclass(slots=True)
class _Calls:
    """What the calls of a step were like."""

    causes: dict[int, str] = field(default_factory=dict)
    """Fork cause by call id."""
    without_loss: int = 0
    constrained: int = 0

    def take(self, recorded: Sequence[Any], ledger: Ledger) -> list[Any]:
        """Note the calls of a rollout; returns those that carry loss."""
        calls = loss_bearing(recorded)
        self.causes |= {call.id: call.fork_cause for call in recorded}
        self.without_loss += len(recorded) - len(calls)
        self.constrained += sum(call.constrained for call in recorded)
        sampled = sum(len(call.response_ids) for call in recorded)
        ledger.sampled += sampled
        ledger.no_loss += sampled - sum(len(call.response_ids) for call in calls)
        return calls


def _reward(member: GradedRollout) -> float:
    assert member.reward is not None
    return member.reward


def loss_settings(recipe: Recipe) -> dict[str, Any]:
    """What the model worker is told about the loss."""
    algorithm = recipe.algorithm
    high, low = algorithm.rollout_rs_threshold, algorithm.rollout_rs_threshold_lower
    return {
        "temperature": recipe.sampling.train.temperature,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "rollout_is": algorithm.rollout_is,
        "rollout_is_threshold": algorithm.rollout_is_threshold,
        "rollout_rs": algorithm.rollout_rs,
        "rollout_rs_bounds": [1 / high if low is None else low, high],
        "kl": algorithm.kl,
        "entropy": algorithm.entropy,
    }


def _rows(
    rollouts: list[TrainedRollout], recipe: Recipe, version: int, ledger: Ledger
) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    """The rows of a step and its plan, rows by micro-batch by mini-batch; weighs the rollouts by the way."""
    rows: list[dict[str, Any]] = []
    plan: list[list[list[int]]] = []
    mini_batches = split_mini_batches(list(range(len(rollouts))), recipe.algorithm.updates_per_step)
    for members in mini_batches:
        first = len(rows)
        rows += _weigh([rollouts[i] for i in members], members, recipe, version, ledger)
        lengths = [len(row["ids"]) // 4 for row in rows[first:]]
        if lengths:
            micro = plan_micro_batches(lengths, recipe.trainer.tokens_per_micro_batch, allow_longer=True)
            plan.append([[first + i for i in batch] for batch in micro])
    return rows, plan


def _weigh(
    rollouts: list[TrainedRollout], numbers: list[int], recipe: Recipe, version: int, ledger: Ledger
) -> list[dict[str, Any]]:
    """Weigh one mini-batch; returns its rows that carry a gradient.

    A row whose advantage is 0 adds exactly 0 to the policy loss and its gradient, so it is counted in every
    denominator but not computed, unless a KL or entropy term gives it a gradient of its own, or the recipe wants the
    entropy of all. `fresh` marks the trained tokens that the weights now in force sampled: there, engine and trainer
    must agree on the log-probability. `constrained` marks those that have an importance weight of 1.
    """
    algorithm = recipe.algorithm
    skip = algorithm.skip_zero_advantage and not algorithm.kl and not algorithm.entropy
    counts = [[sample.trained_tokens for sample in rollout.samples] for rollout in rollouts]
    weights = token_weights(recipe.normalize, counts, constant=recipe.agent.limits.sampled_tokens)
    rows = []
    for number, rollout, per_sample in zip(numbers, rollouts, weights, strict=True):
        rollout.weights = per_sample
        for sample, weight in zip(rollout.samples, per_sample, strict=True):
            if rollout.advantage == 0 and skip:
                ledger.zero_advantage += sample.trained_tokens
                continue
            ledger.computed += sample.trained_tokens
            rows.append(
                {
                    "ids": pack_ids(sample.input_ids),
                    "mask": bytes(sample.loss_mask),
                    "fresh": bytes(
                        v == version and not held for v, held in zip(sample.versions, sample.constrained, strict=True)
                    ),
                    "constrained": bytes(sample.constrained),
                    "logprobs": pack_floats(sample.logprobs),
                    "advantage": rollout.advantage,
                    "weight": weight,
                    "rollout": number,
                    "name": rollout.rollout_id,
                }
            )
    return rows
