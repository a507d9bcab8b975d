"""What an update does depends neither on how rollouts fell into samples nor on how samples fell into micro-batches.

All of it in float64, through the real way from rollouts to gradients, so that only what is exact passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from aglite.config import Recipe  # noqa: E402
from aglite.training.batch import GradedRollout, build_batch  # noqa: E402
from aglite.training.samples import join_path  # noqa: E402
from aglite.worker.trainer import Trainer  # noqa: E402

EXACT = 1e-10
SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@dataclass
class Turn:
    """A call as the trainer reads it."""

    id: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[list[int]]
    constrained: bool = False
    delivered: bool = True
    retry_of: int | None = None
    fork_cause: str = ""


@dataclass
class ARollout:
    name: str
    reward: float
    chains: list[list[Turn]] = field(default_factory=list)
    """Conversations: each turn's prompt begins with all of the turn before."""
    cuts: list[set[int]] = field(default_factory=list)
    """Before which turns each conversation is broken off and encoded anew."""

    def samples(self) -> list[Any]:
        """Each piece of a conversation as a sample of its own, what came before it without loss."""
        found = []
        for chain, cuts in zip(self.chains, self.cuts, strict=True):
            bounds = [0, *sorted(cuts), len(chain)]
            for start, stop in pairwise(bounds):
                if stop > start:
                    found.append(join_path([(turn, at >= start) for at, turn in enumerate(chain[:stop])]))
        return found


@st.composite
def groups(draw: Any) -> list[list[ARollout]]:
    """Two groups of two or three rollouts, of one or two conversations of up to three turns."""
    token, number = st.integers(3, 96), iter(range(1, 10_000))
    made = []
    for group in range(2):
        rollouts = []
        shared = draw(st.lists(token, min_size=2, max_size=6))
        for member in range(draw(st.integers(2, 3))):
            rollout = ARollout(f"r-{group}{member}", draw(st.sampled_from([0.0, 0.3, 1.0])))
            for _ in range(draw(st.integers(1, 2))):
                chain: list[Turn] = []
                whole = list(shared)
                for _ in range(draw(st.integers(1, 3))):
                    prompt = whole + draw(st.lists(token, min_size=1, max_size=4))
                    response = draw(st.lists(token, min_size=1, max_size=5))
                    logprobs = [-draw(st.floats(2.0, 7.0, width=32)) for _ in response]
                    spans = [[draw(st.integers(0, 3)), len(response)]]
                    chain.append(Turn(next(number), prompt, response, logprobs, spans, draw(st.integers(0, 5)) == 0))
                    whole = prompt + response
                rollout.chains.append(chain)
                rollout.cuts.append(draw(st.sets(st.integers(1, 2))) & set(range(1, len(chain))))
            rollouts.append(rollout)
        made.append(rollouts)
    return made


TERMS = (
    {"kl": 0.2, "entropy": 0.05},
    {"rollout_is": "sequence", "kl": 0.1},
    {"rollout_rs": "token", "rollout_rs_threshold": 3.0, "entropy": 0.03},
    {"rollout_rs": "sequence", "rollout_is": "none", "kl": 0.1},
    {"updates_per_step": 2, "kl": 0.1},
    {},
)


def recipe(name: str, normalize: str | None, **algorithm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": "m",
            "tasks": {"train": "t.jsonl", "val": "t.jsonl"},
            "agent": {"command": ["true"], "limits": {"sampled_tokens": 50}},
            "reward": {"grade": "g.py:g"},
            "algorithm": {"name": name, "normalize": normalize, "group_size": 2, **algorithm},
        }
    )


def message(rollouts: list[list[ARollout]], settings: Recipe, *, whole: bool) -> dict[str, Any] | None:
    """The batch with conversations as they are, or broken up at their cuts."""
    by_name = {rollout.name: rollout for group in rollouts for rollout in group}

    def build(calls: list[Turn]) -> list[Any]:
        rollout = next(one for one in by_name.values() if calls[0] is one.chains[0][0])
        return (
            ARollout("", 0.0, rollout.chains, [set() for _ in rollout.chains]).samples() if whole else rollout.samples()
        )

    graded = [[GradedRollout(one.name, "task", one.reward) for one in group] for group in rollouts]
    with mock.patch("aglite.training.batch.build_samples", build):
        batch = build_batch(
            graded,
            lambda name: [turn for chain in by_name[name].chains for turn in chain],
            settings,
            version=3,
            baseline=0.4,
            lr=0.0,
        )
    return batch.message


@pytest.fixture(scope="module", autouse=True)
def float64(one_thread):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trainers(tiny_model, float64):
    """Trainers in float64 with budgets of one row, some rows and all of them; the reference is another model."""
    made = []
    for budget in (1, 40, 100_000):
        trainer = Trainer(tiny_model, kl=1.0, grad_clip=1e12, tokens_per_micro_batch=budget)
        for module in (trainer.module, trainer._reference.engine.module):
            module.double()
            for part in module.modules():
                if type(part).__name__ == "LlamaRMSNorm":  # transformers computes it in float32
                    part.forward = MethodType(_norm, part)
        noise = torch.Generator().manual_seed(1)
        for _, weight in trainer.weights():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.02)
        made.append(trainer)
    return made


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def outcome(trainer: Trainer, batch: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """What the step reports, and the gradients of its updates side by side."""
    gradients = []

    def note(*_: Any) -> None:
        gradients.extend(p.grad.flatten().clone() for p in trainer.module.parameters())

    hook = trainer.optimizer.register_step_pre_hook(note)
    try:
        result = trainer.train(batch)
    finally:
        hook.remove()
    return result, torch.cat(gradients)


def assert_same(one: tuple[dict[str, Any], torch.Tensor], other: tuple[dict[str, Any], torch.Tensor]) -> None:
    assert (one[1] - other[1]).norm() <= EXACT * max(1e-6, float(other[1].norm()))
    for key in ("loss", "grad_norm", "entropy", "kl_rollout", "kl_ref", "ratio_max", "rejected_tokens"):
        if key in one[0]:
            assert one[0][key] == pytest.approx(other[0][key], rel=1e-9, abs=1e-12), key
    assert one[0]["trained_tokens"] == other[0]["trained_tokens"]


@SLOW
@given(
    groups(),
    st.sampled_from(["grpo", "rloo", "dr_grpo", "reinforce"]),
    st.sampled_from(["rollout", "rollout_constant", "token"]),
    st.sampled_from(TERMS),
)
def test_how_rollouts_fall_into_samples_changes_nothing(trainers, rollouts, name, normalize, terms):
    settings = recipe(name, normalize, **terms)
    whole, broken = (message(rollouts, settings, whole=whole) for whole in (True, False))
    assert (whole is None) == (broken is None)
    if whole is not None and broken is not None:
        assert_same(outcome(trainers[2], broken), outcome(trainers[2], whole))


@SLOW
@given(groups(), st.sampled_from(["rollout", "token", "sample"]), st.sampled_from(TERMS))
def test_how_samples_fall_into_micro_batches_changes_nothing(trainers, rollouts, normalize, terms):
    batch = message(rollouts, recipe("grpo", normalize, **terms), whole=False)
    if batch is not None:
        alone, some, together = (outcome(trainer, batch) for trainer in trainers)
        assert alone[0]["micro_batches"] >= some[0]["micro_batches"] >= together[0]["micro_batches"]
        assert_same(alone, together)
        assert_same(some, together)


def test_weights_over_samples_do_depend_on_it(trainers):
    """`normalize: sample` is there to show what the others avoid."""
    turns = [
        Turn(1, [3, 4], [5], [-4.0], [[3, 1]]),
        Turn(2, [3, 4, 5, 6], [7, 8, 9], [-4.0] * 3, [[3, 3]]),
    ]
    other = Turn(3, [3, 4], [9, 9], [-4.0] * 2, [[3, 2]])
    rollouts = [[ARollout("a", 1.0, [turns], [{1}]), ARollout("b", 0.0, [[other]], [set()])]]
    found = {}
    for normalize in ("rollout", "sample"):
        settings = recipe("grpo", normalize)
        found[normalize] = [
            outcome(trainers[2], message(rollouts, settings, whole=whole))[1] for whole in (True, False)
        ]
    gap = {name: float((one - two).norm() / one.norm()) for name, (one, two) in found.items()}
    assert gap["rollout"] < EXACT and gap["sample"] > 0.05
