"""The forward pass, cached and not, agrees with transformers."""

from __future__ import annotations

import json
import random

import pytest
import torch
from engine_driver import FAMILIES, VOCAB, greedy, make_engine, make_model, sample_all, teacher_forced

from aglite.engine.embedded import model as model_module
from aglite.engine.embedded.attention import attend_partly, attend_partly_anywhere
from aglite.errors import EngineError


def mixed_prompts() -> list[list[int]]:
    """Short and long prompts, some with common prefixes that end inside, at and after a page."""
    rng = random.Random(1)
    base = [rng.randrange(VOCAB) for _ in range(140)]
    shapes = ((1, 0), (140, 0), (140, 0), (140, 5), (130, 70), (64, 0), (65, 0), (0, 90), (128, 0), (20, 3), (140, 1))
    return [base[:kept] + [rng.randrange(VOCAB) for _ in range(new)] for kept, new in shapes]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs(family, packed, tmp_path, monkeypatch):
    reference = make_model(family, tmp_path)
    if not packed:
        monkeypatch.setattr(model_module, "can_pack", lambda device: False)
    engine = make_engine(tmp_path)
    assert engine.model.packed == packed
    prompts = mixed_prompts()
    gaps = []
    for prompt, result in zip(prompts, sample_all(engine, prompts), strict=True):
        assert result.tokens == greedy(reference, prompt, 20)
        assert result.reason == "length"
        expected = teacher_forced(reference, prompt + result.tokens)[len(prompt) - 1 :]
        gaps += [abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)]
    assert sum(gaps) / len(gaps) < 1e-5


def test_logprobs_at_a_temperature(llama):
    reference, folder = llama
    engine = make_engine(folder)
    prompts = mixed_prompts()
    for prompt, result in zip(prompts, sample_all(engine, prompts, temperature=0.7, top_p=0.8, seed=3), strict=True):
        row = prompt + result.tokens
        expected = teacher_forced(reference, row, 0.7)
        assert result.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
        assert engine.logprobs([row], 0.7)[0] == pytest.approx(expected, abs=1e-4)


def test_long_rows_of_logprobs(llama):
    reference, folder = llama
    engine = make_engine(folder)
    rng = random.Random(5)
    rows = [[rng.randrange(VOCAB) for _ in range(length)] for length in (300, 1, 2, 129, 130)]
    for row, got in zip(rows, engine.logprobs(rows, 1.0), strict=True):
        assert got == pytest.approx(teacher_forced(reference, row) if len(row) > 1 else [], abs=1e-4)


def test_partial_attention_is_the_same_on_every_device():
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 2, 3, 16), torch.randn(5, 2, 64, 16), torch.randn(5, 2, 64, 16)
    lengths = torch.tensor([64, 1, 0, 33, 7])[:, None, None, None]
    mask = torch.where(torch.arange(64) < lengths, 0.0, -1e30).expand(5, 1, 3, 64)
    out, lse = attend_partly(query, key, value, mask)
    expected, expected_lse = attend_partly_anywhere(query, key, value, mask)
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    assert lse[2].max() < -1e29, "a part with nothing to see must weigh nothing"
    visible = [0, 1, 3, 4]
    assert torch.allclose(out[visible], expected[visible], atol=1e-5)


def test_weights_in_several_files(llama, tmp_path):
    reference, folder = llama
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = mixed_prompts()[1]
    assert sample_all(make_engine(tmp_path), [prompt])[0].tokens == sample_all(make_engine(folder), [prompt])[0].tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": 4}, "missing"),
        ({"intermediate_size": 96}, "does not fit"),
        ({"num_hidden_layers": 2}, "does not fit"),
    ],
)
def test_models_it_cannot_run_are_refused(llama, tmp_path, change, message):
    _, folder = llama
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(EngineError, match=message):
        make_engine(tmp_path)


def test_folders_without_a_model_are_refused(tmp_path, llama):
    with pytest.raises(EngineError, match=r"config\.json"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_bytes((llama[1] / "config.json").read_bytes())
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        make_engine(tmp_path)
