"""Training of an adapter: what moves, what is merged, what comes back from a checkpoint."""

import json
import math

import pytest

torch = pytest.importorskip("torch")

from peft import PeftModel  # noqa: E402
from training_rows import LORA, ids_of, message, random_rows, whole  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from aglite.errors import AgliteError  # noqa: E402

ROWS = random_rows(21)
IDS = ids_of(ROWS)
PLAN = whole(ROWS)


@pytest.fixture
def make_trainer(make_trainer):
    return lambda **settings: make_trainer(**{"lora": LORA} | settings)


def logprobs(model, ids, temperature=0.7):
    ids = torch.tensor([ids])
    with torch.no_grad():
        logs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logs.gather(-1, ids[0, 1:, None])[:, 0]


def distance(found, model):
    """Mean over tokens: of this model's random weights, single tokens feel rounding a few times as much."""
    return torch.cat([torch.tensor(f) - logprobs(model, ids) for f, ids in zip(found, IDS, strict=True)]).abs().mean()


def batch(trainer, **changes):
    return message(ROWS, trainer.logprobs(IDS, 0.7), PLAN, **changes)


def test_the_adapter_learns_and_the_weights_stay(make_trainer, tiny_model):
    trainer = make_trainer()
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    assert {name: value.shape for name, value in trainer.weights()} == {n: p.shape for n, p in start.items()}
    assert all(torch.equal(value, start[name]) for name, value in trainer.weights())
    before = {name: p.clone() for name, p in trainer.module.named_parameters()}
    result = trainer.train(batch(trainer))
    assert result["applied"] and result["grad_norm"] > 0
    for name, parameter in trainer.module.named_parameters():
        assert torch.equal(before[name], parameter) != ("lora_B" in name), name
    merged = {name for name, value in trainer.weights() if not torch.equal(value, start[name])}
    assert merged == {name for name in start if "_proj." in name}


def test_one_update_equals_peft_and_plain_torch(make_trainer, tiny_model, tmp_path):
    trainer = make_trainer(lora=LORA | {"targets": ["q_proj", "down_proj"]})
    trainer.save(tmp_path / "step-0", {})
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path / "step-0" / "trainer", is_trainable=True)
    result = trainer.train(batch(trainer))
    loss = torch.zeros(())
    for ids, mask, advantage, weight in ROWS:
        ids, mask = torch.tensor([ids]), torch.tensor(mask[1:])
        logs = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        loss = loss - (weight * advantage * (logs - logs.detach()).exp() * mask).sum()
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, 1e9)
    assert len(trained) == 3 * 2 * 2
    assert result["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_what_is_written_is_the_model_with_its_adapter(make_trainer, tiny_model, tmp_path):
    trainer = make_trainer()
    for _ in range(3):
        trainer.train(batch(trainer))
    found = trainer.logprobs(IDS, 0.7)
    trainer.save(tmp_path / "step-3", {"step": 3})
    trainer.export(tmp_path / "export")
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert distance(found, plain) > 0.05
    for folder in (tmp_path / "step-3", tmp_path / "export"):
        assert distance(found, AutoModelForCausalLM.from_pretrained(folder)) < 1e-5
    beside = PeftModel.from_pretrained(plain, tmp_path / "step-3" / "trainer")
    assert distance(found, beside) < 1e-5
    about = json.loads((tmp_path / "step-3" / "trainer" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (4, 8, str(tiny_model))


def test_a_checkpoint_resumes_bit_for_bit(make_trainer, tmp_path):
    trainer = make_trainer()
    data = batch(trainer)
    trainer.train(data)
    trainer.save(tmp_path / "step-1", {"step": 1})
    expected = [trainer.train(data), trainer.train(data)]
    other = make_trainer(seed=99)
    assert other.load(tmp_path / "step-1") == {"step": 1}
    again = [other.train(data), other.train(data)]
    assert [one["grad_norm"] for one in again] == [one["grad_norm"] for one in expected]
    for (name, mine), (_, theirs) in zip(trainer.weights(), other.weights(), strict=True):
        assert torch.equal(mine, theirs), name
    for one, two in zip(
        trainer.optimizer.state_dict()["state"].values(), other.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(one[key], two[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def test_the_reference_is_the_model_without_its_adapter(make_trainer, tiny_model):
    trainer = make_trainer(kl=0.5)
    assert trainer.train(batch(trainer, kl=0.5))["kl_ref"] == pytest.approx(0, abs=1e-7)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    gaps = []
    for (ids, mask, *_), now in zip(ROWS, trainer.logprobs(IDS, 0.7), strict=True):
        gap = logprobs(base, ids) - torch.tensor(now)
        gaps += (gap.exp() - 1 - gap)[torch.tensor(mask[1:], dtype=torch.bool)].tolist()
    measured = trainer.train(batch(trainer, kl=0.5))["kl_ref"]
    assert measured == pytest.approx(sum(gaps) / len(gaps), rel=1e-3) and measured > 1e-4
    assert trainer.logprobs(IDS[:1], 0.7)[0] != logprobs(base, IDS[0]).tolist()


def test_what_does_not_fit_is_refused(make_trainer, tmp_path):
    with pytest.raises(AgliteError, match=r"trainer\.lora\.targets: .* has no module of such a name") as refusal:
        make_trainer(lora=LORA | {"targets": ["query_projection"]})
    assert "q_proj" in refusal.value.mend
    whole, adapter = make_trainer(lora=None), make_trainer()
    whole.save(tmp_path / "whole", {})
    adapter.save(tmp_path / "adapter", {})
    with pytest.raises(AgliteError, match="has no adapter, and this run trains one"):
        adapter.load(tmp_path / "whole")
    with pytest.raises(AgliteError, match="has an adapter, and this run trains none"):
        whole.load(tmp_path / "adapter")
    with pytest.raises(AgliteError, match="another model"):
        make_trainer(lora=LORA | {"targets": ["q_proj"]}).load(tmp_path / "adapter")


def test_an_update_that_is_not_finite_leaves_the_adapter_alone(make_trainer):
    trainer = make_trainer()
    spoiled = [row if index else (*row[:2], math.inf, row[3]) for index, row in enumerate(ROWS)]
    result = trainer.train(message(spoiled, trainer.logprobs(IDS, 0.7), PLAN))
    assert not result["applied"] and not trainer.optimizer.state_dict()["state"]
