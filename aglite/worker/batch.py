"""Rows of a training batch as verl's tensors.

verl speaks of prompts and responses. Here sampled tokens may stand anywhere in a row, so its first token is the prompt
and all others the response; which of those are trained is the response mask's business. Per-token tensors are padded
to [rows, longest - 1]; column j belongs to token j + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from aglite.errors import EngineError
from aglite.worker.io import unpack_floats, unpack_ids


@dataclass(slots=True, frozen=True)
class Row:
    """One sample; `mask`, `logprobs`, `fresh` and `constrained` have one entry a token.

    `fresh` marks the trained tokens that the weights in force have sampled, whose recorded log-probability must equal
    the trainer's; `constrained` those that were sampled under a grammar, whose importance weight is 1 and which are
    compared with nothing. Rows of one rollout have its number.
    """

    ids: list[int]
    mask: bytes
    logprobs: list[float]
    fresh: bytes
    constrained: bytes
    advantage: float
    weight: float
    rollout: int

    def expected(self) -> list[float]:
        """Of every token but the first: what the weights in force gave it when it was sampled, NaN if others did."""
        pairs = zip(self.logprobs[1:], self.fresh[1:], strict=True)
        return [logprob if fresh else math.nan for logprob, fresh in pairs]


def read_rows(batch: dict[str, Any]) -> list[Row]:
    """The rows of a `train` message. Raises EngineError on a row that cannot be trained."""
    rows = []
    for index, raw in enumerate(batch["rows"]):
        ids, mask, logprobs = unpack_ids(raw["ids"]), raw["mask"], unpack_floats(raw["logprobs"])
        fresh = raw.get("fresh") or bytes(len(ids))
        constrained = raw.get("constrained") or bytes(len(ids))
        if not len(ids) == len(mask) == len(logprobs) == len(fresh) == len(constrained):
            raise EngineError(f"row {index}: {len(ids)} ids, {len(mask)} mask entries, {len(logprobs)} logprobs")
        if mask and mask[0]:
            raise EngineError(f"row {index}: its first token has no context and cannot be trained")
        if not any(mask):
            raise EngineError(f"row {index}: no trained token")
        rows.append(Row(ids, mask, logprobs, fresh, constrained, raw["advantage"], raw["weight"], raw["rollout"]))
    return rows


def micro_batch(rows: Sequence[Row], **tensors: torch.Tensor) -> TensorDict:
    """What verl's engine takes, with `tensors` ([rows, longest - 1]) added."""
    data = TensorDict(
        {
            "input_ids": nested([row.ids for row in rows]),
            "position_ids": nested([range(len(row.ids)) for row in rows]),
            "prompts": nested([row.ids[:1] for row in rows]),
            "responses": nested([row.ids[1:] for row in rows]),
            "response_mask": padded([list(row.mask) for row in rows], torch.long),
            **tensors,
        },
        batch_size=[len(rows)],
    )
    data["loss_mask"] = data["response_mask"]
    return data


def loss_batch(
    part: list[int],
    rows: list[Row],
    start: dict[int, list[float]] | None,
    totals: tuple[list[list[float]], list[list[float]]] | None,
    reference: dict[int, list[float]] | None,
    engine: dict[int, list[float]],
) -> TensorDict:
    """What the loss needs of one micro-batch."""
    members = [rows[index] for index in part]
    weights = padded([[row.weight] * len(row.ids) for row in members])
    data = micro_batch(
        members,
        rollout_log_probs=padded([row.logprobs for row in members]),
        advantages=weights * torch.tensor([[row.advantage] for row in members], dtype=weights.dtype),
        weights=weights,
        constrained=padded([list(row.constrained) for row in members], torch.bool),
        engine_log_probs=padded([[0.0, *engine.get(index, rows[index].expected())] for index in part]),
    )
    if start is not None:
        data["old_log_probs"] = padded([[0.0, *start[index]] for index in part])
    if totals is not None:
        for name, values in zip(("sequence_sums", "sequence_means"), totals, strict=True):
            data[name] = torch.tensor([values[index] for index in part], dtype=weights.dtype)
    if reference is not None:
        data["ref_log_prob"] = padded([[0.0, *reference[index]] for index in part])
    return data


def nested(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(list(row)) for row in rows], layout=torch.jagged)


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of all tokens of each row, without the first token's, padded with 0: [rows, longest - 1]."""
    width = max(len(row) for row in rows) - 1
    values = [list(row[1:]) + [0] * (width + 1 - len(row)) for row in rows]
    return torch.tensor(values, dtype=dtype or torch.get_default_dtype())
