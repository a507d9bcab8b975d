"""One step from the store to the gradient, beside the design's formulas in plain torch.

The plain side knows nothing of samples, rows or micro-batches: it walks through calls, one forward pass for each.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from aglite.config import Recipe  # noqa: E402
from aglite.store import CallRecord, Store  # noqa: E402
from aglite.training.batch import GradedRollout, build_batch  # noqa: E402
from aglite.worker.io import FrameReader, encode  # noqa: E402
from aglite.worker.trainer import Trainer  # noqa: E402

TEMPERATURE = 0.7
VERSION = 5
BASELINE = 0.35
LIMIT = 64
KL, ENTROPY = 1.5, 0.3


@dataclass
class ACall:
    """A call; `sample`: the one of its rollout that it is trained in, None when it carries no loss."""

    prompt: list[int]
    response: list[int]
    sample: int | None = 0
    version: int = VERSION
    constrained: bool = False
    retry: bool = False
    off: float = 0.1
    """By how much the recorded log-probabilities differ from those of the weights in force."""
    recorded: list[float] = field(default_factory=list)


GROUPS: list[dict[str, tuple[float | None, list[ACall]]]] = [
    {
        # a conversation of three turns, the second under a grammar: one sample
        "conversation": (
            1.0,
            [
                ACall([3, 4, 5], [10, 11, 2]),
                ACall([3, 4, 5, 10, 11, 2, 20], [12, 2], version=4, constrained=True),
                ACall([3, 4, 5, 10, 11, 2, 20, 12, 2, 21, 22], [13, 14, 15, 2], version=3, off=-0.9),
            ],
        ),
        # a sub-agent between two turns: two samples, and a reply that never arrived
        "sub-agent": (
            0.0,
            [
                ACall([3, 4, 5], [30, 2], off=0.2),
                ACall([60, 61, 62, 63], [31, 32, 33, 34, 35, 2], sample=1, off=-0.4),
                ACall([3, 4, 5, 30, 2, 40], [36, 37], sample=None),
                ACall([3, 4, 5, 30, 2, 40], [38, 2], off=0.3),
            ],
        ),
        # best of two: both replies are trained, one goes on; and a retry's unused copy
        "best-of-2": (
            0.25,
            [
                ACall([3, 4, 5], [50, 2], sample=0),
                ACall([3, 4, 5], [51, 52, 2], sample=1, off=0.8),
                ACall([3, 4, 5, 51, 52, 2, 41], [53, 2], sample=1, version=4),
                ACall([3, 4, 5, 51, 52, 2, 41], [53, 2], sample=None, retry=True),
            ],
        ),
        "lost": (None, [ACall([3, 4, 5], [55, 2])]),
        "stale": (0.7, [ACall([3, 4, 5], [56, 57, 2], version=1)]),
        "silent": (0.1, []),
    },
    {
        "equal-1": (0.5, [ACall([6, 7], [70, 71, 2])]),
        "equal-2": (0.5, [ACall([6, 7], [72, 2])]),
    },
]


def recipe(name: str, normalize: str, **algorithm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": "m",
            "tasks": {"train": "t.jsonl", "val": "t.jsonl"},
            "agent": {"command": ["true"], "limits": {"sampled_tokens": LIMIT}},
            "reward": {"grade": "g.py:g"},
            "sampling": {"train": {"temperature": TEMPERATURE}},
            "algorithm": {"name": name, "normalize": normalize, "max_staleness": 3, **algorithm},
        }
    )


def probabilities(model: Any, call: ACall) -> torch.Tensor:
    """log p of the whole vocabulary before each sampled token: [sampled, vocabulary]."""
    logits = model(torch.tensor([call.prompt + call.response])).logits[0]
    start = len(call.prompt) - 1
    return (logits[start : start + len(call.response)] / TEMPERATURE).log_softmax(-1)


def plain_advantages(name: str, rewards: list[float]) -> list[float]:
    if name == "reinforce":
        return [reward - BASELINE for reward in rewards]
    mean = statistics.fmean(rewards)
    if name == "grpo":
        return [(reward - mean) / (statistics.stdev(rewards) + 1e-6) for reward in rewards]
    if name == "dr_grpo":
        return [reward - mean for reward in rewards]
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


def plain_step(model: Any, reference: Any, name: str, normalize: str) -> tuple[float, float]:
    """Loss and gradient norm, by the formulas alone."""
    trained = []  # (advantage, calls) of each rollout that has trained tokens and is not stale
    for group in GROUPS:
        graded = [(reward, calls) for reward, calls in group.values() if reward is not None]
        for advantage, (_, calls) in zip(plain_advantages(name, [reward for reward, _ in graded]), graded, strict=True):
            with_loss = [call for call in calls if call.sample is not None]
            if with_loss and VERSION - min(call.version for call in with_loss) <= 3:
                trained.append((advantage, with_loss))
    tokens = [sum(len(call.response) for call in calls) for _, calls in trained]
    samples = [{call.sample for call in calls} for _, calls in trained]
    loss = torch.zeros((), dtype=torch.float64)
    for (advantage, calls), total in zip(trained, tokens, strict=True):
        for call in calls:
            of_sample = sum(len(other.response) for other in calls if other.sample == call.sample)
            weight = {
                "rollout": 1 / (len(trained) * total),
                "rollout_constant": 1 / (len(trained) * LIMIT),
                "token": 1 / sum(tokens),
                "sample": 1 / (sum(map(len, samples)) * of_sample),
            }[normalize]
            logs = probabilities(model, call)
            at = torch.tensor(call.response)[:, None]
            now = logs.gather(-1, at)[:, 0]
            with torch.no_grad():
                start = now.clone()
                ref = probabilities(reference, call).gather(-1, at)[:, 0]
                w = (start - torch.tensor(call.recorded, dtype=torch.float64)).exp().clamp(max=2.0)
                w = torch.ones_like(w) if call.constrained else w
            policy = -((now - start).exp() * advantage * w)  # one update: no clip acts where the ratio is 1
            k3 = (ref - now).exp() - 1 - (ref - now)
            entropy = -(logs.exp() * logs).sum(-1)
            loss = loss + weight * (policy + KL * k3 - ENTROPY * entropy).sum()
    loss.backward()
    return loss.item(), math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None))


@pytest.fixture(scope="module")
def trainer(tiny_model, one_thread):
    """A trainer whose weights have left the reference's."""
    made = Trainer(tiny_model, kl=1.0, grad_clip=1e12, tokens_per_micro_batch=24)
    noise = torch.Generator().manual_seed(3)
    for _, weight in made.weights():
        weight.add_(torch.randn(weight.shape, generator=noise) * 0.006)
    return made


@pytest.fixture
def models(trainer, tiny_model):
    """The trainer's model and the reference in plain float64."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for name, weight in trainer.weights():
            policy.get_parameter(name).copy_(weight)
    return policy, reference


@pytest.fixture
async def store(tmp_path: Path, models):
    """The rollouts as the gateway would have recorded them."""
    opened = Store.open(tmp_path / "aglite.db")
    for number, group in enumerate(GROUPS):
        await opened.add_group(f"g{number}", f"t{number}", "train", len(group))
        for name, (reward, calls) in group.items():
            await opened.add_rollout(name, f"t{number}", f"g{number}", "train", "local")
            await opened.set_rollout_state(name, "starting", attempt=1)
            earlier = 0
            for call in calls:
                with torch.no_grad():
                    exact = probabilities(models[0], call).gather(-1, torch.tensor(call.response)[:, None])[:, 0]
                # off by more, by less, by more, ...: some weights are cut, some are not
                shifts = [call.off * (1.5 if place % 2 else -1) for place in range(len(call.response))]
                call.recorded = torch.tensor(
                    [value + shift for value, shift in zip(exact.tolist(), shifts, strict=True)], dtype=torch.float32
                ).tolist()
                earlier = await opened.add_call(
                    CallRecord(
                        rollout_id=name,
                        attempt=1,
                        new_prompt_ids=call.prompt,
                        prompt_len=len(call.prompt),
                        response_ids=call.response,
                        logprobs=call.recorded,
                        versions=[[call.version, len(call.response)]],
                        dialect="chat",
                        status="ok",
                        started_at=0.0,
                        finished_at=1.0,
                        fork_cause="first",
                        delivered=call.sample is not None or call.retry,
                        retry_of=earlier if call.retry else None,
                        constrained=call.constrained,
                    )
                )
            await opened.set_rollout_state(name, "done" if reward is not None else "error", reward=reward)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "name, normalize",
    [
        (name, normalize)
        for name in ("grpo", "rloo", "dr_grpo", "reinforce")
        for normalize in ("rollout", "rollout_constant", "token", "sample")
        if (name, normalize) != ("dr_grpo", "sample")
    ],
)
async def test_a_step_is_what_the_formulas_say(store, trainer, models, name, normalize):
    graded = [
        [GradedRollout(rollout, f"t{number}", reward) for rollout, (reward, _) in group.items()]
        for number, group in enumerate(GROUPS)
    ]
    settings = recipe(name, normalize, kl=KL, entropy=ENTROPY)
    batch = build_batch(graded, store.calls, settings, version=VERSION, baseline=BASELINE, lr=0.0)
    (frame,) = FrameReader().feed(encode({"op": "call", "batch": batch.message}))  # as it crosses the socket
    result = trainer.train(frame["batch"])
    loss, norm = plain_step(*models, name, normalize)
    assert result["loss"] == pytest.approx(loss, rel=5e-5)  # of 32 bits beside 64
    assert result["grad_norm"] == pytest.approx(norm, rel=5e-5)
    assert result["micro_batches"] > 2 and result["correction_capped"] > 0 and result["kl_ref"] > 0
    assert batch.fates == {
        **dict.fromkeys(("conversation", "sub-agent", "best-of-2", "equal-1", "equal-2"), "trained"),
        "stale": "stale",
        "silent": "baseline_only",
    }
    assert batch.metrics["ledger"] == {
        "sampled": 38,
        "no_loss": 4,
        "set_aside": 0,
        "stale": 3,
        "zero_advantage": 0,
        "computed": 31,
    }
    assert result["trained_tokens"] == 31
