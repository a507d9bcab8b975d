"""The policy loss of a step, put together from verl's own functions, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding


@dataclass(slots=True)
class Tally:
    """Sums over the trained tokens of a step."""

    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    kl_rollout: float = 0.0
    kl_ref: float = 0.0
    off_policy: float = 0.0
    compared: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0

    def compare(self, gaps: torch.Tensor) -> None:
        """Note differences between the engine's log-probabilities and the trainer's under equal weights."""
        if gaps.numel():
            self.compared += gaps.numel()
            self.gap += float(gaps.abs().sum())
            self.gap_max = max(self.gap_max, float(gaps.abs().max()))

    def metrics(self, with_reference: bool) -> dict[str, float]:
        tokens = max(self.tokens, 1.0)
        metrics = {
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "correction_capped": self.capped / tokens,
            "kl_rollout": self.kl_rollout / tokens,
            "off_policy_gap_mean": self.off_policy / tokens,
            "logprob_gap_mean": self.gap / max(self.compared, 1.0),
            "logprob_gap_max": self.gap_max,
            "logprob_gap_tokens": self.compared,
        }
        return metrics | {"kl_ref": self.kl_ref / tokens} if with_reference else metrics


class PolicyLoss:
    """verl's vanilla (clipped, dual-clipped) policy loss, summed over tokens.

    `advantages` of the data are A times the token's weight, so that sum_t weight * clipped(ratio, A) * w comes out:
    clipping is linear in A. pi_start is `old_log_probs` where the data has them, else this very forward pass, detached
    (ratio 1 exactly, its gradient that of log pi). w = min(pi_start / pi_rollout, cap), detached. The KL term to the
    reference is weight * k3(pi || pi_ref) per token (Schulman 2020, low variance), times `kl`.

    verl's dual clip stays on: for A < 0 the loss of a token is bounded by 3 |A|.
    """

    def __init__(self, batch: dict[str, Any], tally: Tally) -> None:
        self._tally = tally
        self._correct = batch["correction"] == "truncated"
        self._cap = float(batch["correction_cap"])
        self._kl = float(batch["kl"])
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
        mask = data["response_mask"].bool()
        if "old_log_probs" not in data:
            data["old_log_probs"] = log_prob.detach()
        log_ratio = data["old_log_probs"] - data["rollout_log_probs"]
        if self._correct:
            data["rollout_is_weights"], _ = compute_rollout_correction_weights(log_ratio, mask, "token", self._cap)
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        if self._kl > 0:
            k3 = kl_penalty(log_prob, data["ref_log_prob"], "low_var_kl")
            loss = loss + self._kl * agg_loss(k3 * data["weights"], mask, "token-sum")
            self._tally.kl_ref += float(k3.detach()[mask].sum())
        self._note(log_ratio[mask], metrics, mask)
        self._tally.entropy += float(model_output["token_entropy"].values().sum())
        gaps = (data["old_log_probs"] - data["engine_log_probs"])[mask]
        self._tally.compare(gaps[~gaps.isnan()])
        return loss, {}

    def _note(self, log_ratio: torch.Tensor, metrics: dict[str, Any], mask: torch.Tensor) -> None:
        tally, tokens = self._tally, float(mask.sum())
        tally.tokens += tokens
        tally.clipped += tokens * float(metrics["actor/pg_clipfrac"].aggregate())
        tally.kl_rollout += float((log_ratio.exp() - 1 - log_ratio).sum())
        tally.off_policy += float(log_ratio.abs().sum())
        if self._correct:
            tally.capped += float((log_ratio.exp() > self._cap).sum())
