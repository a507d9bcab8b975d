"""Sampled tokens follow the distribution they should, and nothing outside of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aglite.engine.embedded.sampler import Draws, sample, uniforms

DRAWS = 20000


def draws_of(rows: int, *, seed: int = 0, **params) -> Draws:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **params}
    seeds = np.full(rows, seed, np.uint64)
    return Draws(**{k: np.full(rows, v) for k, v in values.items()}, uniform=uniforms(seeds, np.arange(rows)))


def counts_of(logits: torch.Tensor, **params) -> np.ndarray:
    tokens, _ = sample(logits.expand(DRAWS, -1), draws_of(DRAWS, **params))
    return np.bincount(tokens.numpy(), minlength=len(logits))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standardised: about normal with mean 0 and deviation 1 when the counts follow the probabilities."""
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * counts.sum()
    freedom = kept.sum() - 1
    return (((counts[kept] - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def reference(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Plain Python: the k likeliest; of these, renormalised, the smallest set of mass top_p; of these, those of at
    least min_p times the largest."""
    p = torch.softmax(logits.double(), -1).numpy()
    order = np.argsort(-p)[: top_k or len(p)]
    mass, kept = 0.0, []
    for token in order:
        if mass >= top_p * p[order].sum() and kept:
            break
        mass += p[token]
        kept.append(token)
    kept = [token for token in kept if p[token] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize("vocab", [7, 48, 96, 512])
@pytest.mark.parametrize("seed", [0, 1])
def test_plain_sampling(vocab, seed):
    torch.manual_seed(seed)
    logits = torch.randn(vocab)
    assert abs(chi_square(counts_of(logits, seed=seed), reference(logits))) < 4


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}, {"top_k": 1}],
)
@pytest.mark.parametrize("vocab", [64, 1000])
def test_truncated_sampling(params, vocab):
    torch.manual_seed(3)
    logits = torch.randn(vocab) * 2
    expected = reference(logits, **params)
    counts = counts_of(logits, **params)
    assert (counts[expected > 0.002] > 0).all()
    if params.get("top_k") == 1:
        assert counts[logits.argmax()] == DRAWS
    else:
        assert abs(chi_square(counts, expected)) < 4


def test_nucleus_wider_than_the_first_candidates():
    logits = torch.zeros(4096)
    tokens, _ = sample(logits.expand(2000, -1), draws_of(2000, top_p=0.9))
    assert len(set(tokens.tolist())) > 1000


def test_rows_of_all_kinds_in_one_batch():
    torch.manual_seed(1)
    logits = torch.randn(6, 300) * 3
    kinds = {
        "temperature": np.array([0.0, 1.0, 1.0, 1.0, 0.5, 0.0]),
        "top_p": np.array([1.0, 1.0, 0.5, 1.0, 1.0, 0.2]),
        "top_k": np.array([0, 0, 0, 3, 0, 9]),
        "min_p": np.zeros(6),
    }
    uniform = uniforms(np.arange(6, dtype=np.uint64), np.zeros(6, np.int64))
    tokens, logprobs = sample(logits, Draws(**kinds, uniform=uniform))
    for row in range(6):
        alone = Draws(**{k: v[row : row + 1] for k, v in kinds.items()}, uniform=uniform[row : row + 1])
        token, _ = sample(logits[row : row + 1], alone)
        assert tokens[row] == token
    assert tokens[0] == logits[0].argmax()
    assert tokens[5] == logits[5].argmax()
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs.double(), expected, atol=1e-5), "log-probabilities are those before truncation"


def test_extreme_logits():
    logits = torch.full((2, 100), -1e4)
    logits[0, 7], logits[1, 99] = 1e4, 1e4
    for params in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
        tokens, logprobs = sample(logits, draws_of(2, **params))
        assert tokens.tolist() == [7, 99]
        assert logprobs.tolist() == [0.0, 0.0]


def test_uniform_numbers():
    numbers = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100), 100))
    assert len(set(numbers)) == 10000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert abs(chi_square(counts, np.full(50, 0.02))) < 4
    grid = numbers.reshape(100, 100)
    for shifted in (grid[1:, :] - grid[:-1, :], grid[:, 1:] - grid[:, :-1]):
        # The difference of independent uniform numbers has variance 1/6.
        assert abs(shifted.var() - 1 / 6) < 0.01
    far = uniforms(np.array([2**64 - 1], np.uint64), np.array([10**9]))
    assert 0 <= far[0] < 1
