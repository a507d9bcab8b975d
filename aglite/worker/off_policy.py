"""What is made of tokens that other weights sampled than those that are trained: importance weights and rejection.

All of it follows from the log-ratio log pi_start - log pi_rollout of each trained token. A *sequence* is all trained
tokens of a rollout, in whichever samples they lie: what is done to it must not depend on how the rollout was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aglite.worker.batch import Row

SAFETY = 20.0
"""Log-ratios are cut to +-20 before they become ratios, as in verl: a product over a rollout would overflow."""


class OffPolicy:
    """Importance weights w (`rollout_is`) and what is rejected (`rollout_rs`), as a `train` message asks for.

    - `rollout_is: token`: w_t = min(r_t, cap) with r_t = pi_start / pi_rollout of the token (truncated importance
      sampling, Ionides 2008); `sequence`: w = min(prod r_t, cap), one for all tokens of the rollout.
    - `rollout_rs: token`: a token with r_t outside [low, high] is not trained; `sequence`: no token of a rollout is
      whose geometric mean of r_t is outside (Zheng et al. 2025, Group Sequence Policy Optimization, for the mean).

    Tokens that were sampled under a grammar are in no product and no mean, and have w = 1.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.level: str = batch["rollout_is"]
        self.cap = float(batch["rollout_is_threshold"])
        self._rejects: str = batch["rollout_rs"]
        self._low, self._high = map(float, batch["rollout_rs_bounds"])

    @property
    def needs_sequences(self) -> bool:
        """Whether log-ratios of whole rollouts are needed, and so a forward pass before the first gradient."""
        return "sequence" in (self.level, self._rejects)

    def ratios(self, log_ratio: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor | None:
        """The importance weights before they are truncated, like `log_ratio` [rows, length]; None if there are none.

        `sums` [rows, 1]: of each row's sequence, see `sequence_log_ratios`.
        """
        if self.level == "none":
            return None
        logs = log_ratio if self.level == "token" or sums is None else sums.expand_as(log_ratio)
        return logs.clamp(-SAFETY, SAFETY).exp()

    def kept(self, log_ratio: torch.Tensor, means: torch.Tensor | None) -> torch.Tensor:
        """Which tokens are not rejected, bool like `log_ratio`. `means` [rows, 1]: of each row's sequence."""
        if self._rejects == "none":
            return torch.ones_like(log_ratio, dtype=torch.bool)
        logs = log_ratio if self._rejects == "token" or means is None else means.expand_as(log_ratio)
        ratios = logs.clamp(-SAFETY, SAFETY).exp()
        return (ratios >= self._low) & (ratios <= self._high)


def sequence_log_ratios(
    rows: Sequence[Row], start: Mapping[int, Sequence[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """For each row, the sum and the mean of log pi_start - log pi_rollout over its rollout's trained tokens: each
    [rows, 1]. `start` holds log pi_start by row number, of every token but the first."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for index, row in enumerate(rows):
        for now, then, trained, held in zip(
            start[index], row.logprobs[1:], row.mask[1:], row.constrained[1:], strict=True
        ):
            if trained and not held:
                sums[row.rollout] = sums.get(row.rollout, 0.0) + now - then
                counts[row.rollout] = counts.get(row.rollout, 0) + 1
    total = [sums.get(row.rollout, 0.0) for row in rows]
    return (
        [[value] for value in total],
        [[value / counts.get(row.rollout, 1)] for row, value in zip(rows, total, strict=True)],
    )
