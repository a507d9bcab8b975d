"""Vectorised sampling: one token and its log-probability for each row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_CANDIDATES = 256  # most likely tokens looked at first for top_p; more are sorted only if they do not suffice


@dataclass(slots=True)
class Draws:
    """Parameters of each row [rows], as SamplingParams has them, and the uniform number in [0, 1) that decides."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def inverse_temperature(self) -> np.ndarray:
        """What to scale logits with; 1 for greedy rows, whose log-probabilities are those at T = 1."""
        return 1.0 / np.where(self.temperature > 0, self.temperature, 1.0)

    def of(self, rows: np.ndarray) -> Draws:
        """The selected rows."""
        return Draws(*(getattr(self, name)[rows] for name in Draws.__slots__))


@dataclass(slots=True)
class Allowed:
    """Which tokens may come next [constrained rows, vocab], and the numbers of those rows."""

    rows: torch.Tensor
    tokens: torch.Tensor


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The number in [0, 1) that belongs to a seed (uint64) and a position in the response, whatever else is sampled.

    A counter-based generator: output `position` of splitmix64 started at the hashed seed, 53 bits of it.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, draws: Draws, allowed: Allowed | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab], already divided by the temperature -> token ids and log-probabilities [rows].

    The log-probabilities are those before top_k, top_p and min_p, which apply in this order, and before `allowed`,
    which comes first of all.
    """
    free = logits
    if allowed is not None:
        logits = logits.clone()
        logits[allowed.rows] = logits[allowed.rows].masked_fill(~allowed.tokens, -torch.inf)
    probabilities = torch.softmax(logits, -1)
    greedy = draws.temperature == 0
    cut = ~greedy & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, choose, source in (
        (greedy, _greedy, logits),
        (cut, _truncated, probabilities),
        (~greedy & ~cut, _plain, probabilities),
    ):
        if rows.all():
            tokens = choose(source, draws)
        elif rows.any():
            index = torch.from_numpy(np.flatnonzero(rows)).to(logits.device)
            tokens[index] = choose(source[index], draws.of(rows))
    logprobs = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    if allowed is not None:  # what the grammar forces may be so improbable that its probability is 0 in float32
        held = free[allowed.rows]
        chosen = held.gather(1, tokens[allowed.rows].unsqueeze(1)).squeeze(1)
        logprobs[allowed.rows] = chosen - torch.logsumexp(held, -1)
    return tokens, logprobs


def most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] -> the `count` most probable tokens of each row, best first, and their log-probabilities."""
    best, ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    return ids, best - torch.logsumexp(logits, -1, keepdim=True)


def _greedy(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    return logits.argmax(-1)


def _plain(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Invert the cumulative distribution: first over blocks of the vocabulary, then within the block."""
    rows, vocab = probabilities.shape
    block = math.gcd(vocab, 256)
    if block < 16:
        block = vocab
    blocks = probabilities.view(rows, vocab // block, block)
    which, rest = _invert(blocks.sum(-1), _column(draws.uniform, probabilities.device))
    inside = blocks[torch.arange(rows, device=probabilities.device), which]
    return which * block + _invert(inside, rest.unsqueeze(1))[0]


def _truncated(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor:
    vocab = probabilities.shape[1]
    top_k = np.where((draws.top_k > 0) & (draws.top_k < vocab), draws.top_k, vocab)
    bounded = top_k < vocab
    size = min(vocab, max(int(top_k[bounded].max(initial=0)), _CANDIDATES if not bounded.all() else 0))
    if probabilities.device.type != "cpu":
        size = vocab  # a look at whether the candidates suffice would cost more than a full sort
    best, ids = probabilities.topk(size, dim=-1)
    total = best.cumsum(-1, dtype=torch.float64)
    if size < vocab:
        suffices = torch.from_numpy(bounded)
        suffices |= (total[:, -1] >= torch.from_numpy(draws.top_p)) & torch.from_numpy(draws.top_p < 1)
        suffices |= best[:, -1] < torch.from_numpy(draws.min_p) * best[:, 0]
        if not suffices.all():
            best, ids = probabilities.sort(dim=-1, descending=True)
            total = best.cumsum(-1, dtype=torch.float64)
            size = vocab
    device = probabilities.device
    limit = torch.from_numpy(top_k).to(device).unsqueeze(1)
    keep = torch.arange(size, device=device) < limit
    mass = torch.where(limit < vocab, total.gather(1, (limit - 1).clamp(max=size - 1)), 1.0)
    keep &= total - best < _column(draws.top_p, device) * mass
    keep &= best >= _column(draws.min_p, device) * best[:, :1]
    keep[:, 0] = True
    chosen, _ = _invert(best * keep, _column(draws.uniform, device))
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index i [rows] with cumulative(i) > uniform * total >= cumulative(i - 1), for weights [rows, n] and uniform
    [rows, 1], and how far into i's own weight that lies, in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index).double()
    inside = (target - (cumulative.gather(1, index) - weight)) / weight
    return index.squeeze(1), inside.clamp_(0, 1 - 2.0**-40).squeeze(1)


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)
