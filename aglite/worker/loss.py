"""The policy loss of a step, put together from verl's own functions, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from aglite.worker.off_policy import SAFETY, OffPolicy


@dataclass(slots=True)
class Tally:
    """Sums over the trained tokens of a step; from `weighed` on, over those of them that were sampled freely."""

    tokens: float = 0.0
    rejected: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl_ref: float = 0.0
    weighed: float = 0.0
    capped: float = 0.0
    kl_rollout: float = 0.0
    off_policy: float = 0.0
    ratio_max: float = 0.0
    compared: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_kl: float = 0.0

    def compare(self, gaps: torch.Tensor) -> None:
        """Note differences between the engine's log-probabilities and the trainer's under equal weights."""
        if gaps.numel():
            self.compared += gaps.numel()
            self.gap += float(gaps.abs().sum())
            self.gap_max = max(self.gap_max, float(gaps.abs().max()))
            self.gap_kl += float((gaps.exp() - 1 - gaps).sum())

    @classmethod
    def of_all(cls, tallies: Sequence[Tally]) -> Tally:
        """What the tallies of all ranks make together."""
        join = {name: max for name in ("ratio_max", "gap_max")}
        names = [field.name for field in fields(cls)]
        return cls(**{name: join.get(name, sum)(getattr(tally, name) for tally in tallies) for name in names})

    def metrics(self, with_reference: bool) -> dict[str, float]:
        tokens, weighed, compared = max(self.tokens, 1.0), max(self.weighed, 1.0), max(self.compared, 1.0)
        metrics = {
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "correction_capped": self.capped / weighed,
            "kl_rollout": self.kl_rollout / weighed,
            "off_policy_gap_mean": self.off_policy / weighed,
            "ratio_max": self.ratio_max,
            "rejected_tokens": self.rejected,
            "logprob_gap_mean": self.gap / compared,
            "logprob_gap_max": self.gap_max,
            "logprob_gap_kl": self.gap_kl / compared,
            "logprob_gap_tokens": self.compared,
            "constrained_tokens": self.tokens - self.weighed,
        }
        return metrics | {"kl_ref": self.kl_ref / tokens} if with_reference else metrics


class PolicyLoss:
    """verl's vanilla (clipped, dual-clipped) policy loss, summed over tokens.

    `advantages` of the data are A times the token's weight, so that sum_t weight * clipped(ratio, A) * w comes out:
    clipping is linear in A. pi_start is `old_log_probs` where the data has them, else this very forward pass, detached
    (ratio 1 exactly, its gradient that of log pi). w and what is rejected are `OffPolicy`'s. The KL term to the
    reference is weight * k3(pi || pi_ref) per token (Schulman 2020, low variance), times `kl`; the entropy bonus is
    -weight * H(pi) per token, times `entropy`. A rejected token is in none of the terms, and stays in every
    denominator.

    A token that was sampled under a grammar came from that grammar's share of the distribution, while the recorded
    log-probability is that of the whole: the quotient says nothing of how far the policy has moved. Its pi_rollout is
    taken to be pi_start, so w = 1, and it stays out of everything that compares the two.

    verl's dual clip stays on: for A < 0 the loss of a token is bounded by 3 |A|.
    """

    def __init__(self, batch: dict[str, Any], tally: Tally) -> None:
        self.tally = tally
        self._off_policy = OffPolicy(batch)
        self._kl = float(batch["kl"])
        self._entropy = float(batch["entropy"])
        self._config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=batch["clip_low"],
            clip_ratio_high=batch["clip_high"],
            loss_agg_mode="token-sum",
            policy_loss=PolicyLossConfig(loss_mode="vanilla"),
            use_torch_compile=False,
        )

    def __call__(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        entropy = no_padding_2_padding(model_output["token_entropy"], data)
        mask = data["response_mask"].bool()
        free = mask & ~data["constrained"]
        if "old_log_probs" not in data:
            data["old_log_probs"] = log_prob.detach()
        data["rollout_log_probs"] = torch.where(data["constrained"], data["old_log_probs"], data["rollout_log_probs"])
        log_ratio = data["old_log_probs"] - data["rollout_log_probs"]
        ratios = self._off_policy.ratios(log_ratio, data.get("sequence_sums"))
        if ratios is not None:
            data["rollout_is_weights"] = torch.where(free, ratios.clamp(max=self._off_policy.cap), 1.0)
        kept = mask & self._off_policy.kept(log_ratio, data.get("sequence_means"))
        data["response_mask"] = kept.long()
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        ranks = data["dp_size"]  # FSDP takes the mean of their gradients, where the sum is wanted
        if self._kl > 0:
            k3 = kl_penalty(log_prob, data["ref_log_prob"], "low_var_kl")
            loss = loss + self._kl * agg_loss(k3 * data["weights"], kept, "token-sum", dp_size=ranks)
            self.tally.kl_ref += float(k3.detach()[mask].sum())
        if self._entropy > 0:
            loss = loss - self._entropy * agg_loss(entropy * data["weights"], kept, "token-sum", dp_size=ranks)
        self._note(log_ratio[free], None if ratios is None else ratios[free], float(mask.sum()))
        self.tally.clipped += float(kept.sum()) * float(metrics["actor/pg_clipfrac"].aggregate())
        self.tally.rejected += float((mask & ~kept).sum())
        self.tally.entropy += float(entropy.detach()[mask].sum())
        gaps = (data["old_log_probs"] - data["engine_log_probs"])[free]
        self.tally.compare(gaps[~gaps.isnan()])
        return loss, {}

    def _note(self, log_ratio: torch.Tensor, ratios: torch.Tensor | None, tokens: float) -> None:
        """`log_ratio`, `ratios`: of the tokens that were sampled freely; `tokens`: how many are trained."""
        tally = self.tally
        tally.tokens += tokens
        tally.weighed += log_ratio.numel()
        tally.kl_rollout += float((log_ratio.exp() - 1 - log_ratio).sum())
        tally.off_policy += float(log_ratio.abs().sum())
        if log_ratio.numel():
            tally.ratio_max = max(tally.ratio_max, float(log_ratio.max().clamp(max=SAFETY).exp()))
        if ratios is not None:
            tally.capped += float((ratios > self._off_policy.cap).sum())
