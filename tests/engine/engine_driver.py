"""Tiny random models of every family that the embedded engine runs, and helpers to drive the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aglite.engine.base import SamplingParams
from aglite.engine.embedded.engine import EmbeddedEngine

VOCAB = 160
LLAMA3_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied-biased-rope3": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 6}),
}


def make_model(family: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A random model with large weights (so that its choices are far from ties), saved to `folder`."""
    config_class, model_class, extra = FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16 if family != "qwen2" else None,
        "max_position_embeddings": 512,
    }
    config = config_class(**{k: v for k, v in {**sizes, **extra}.items() if v is not None})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
    model.save_pretrained(folder)
    return model


def make_engine(folder: Path, **changes) -> EmbeddedEngine:
    settings = {"context_length": 300, "max_running": 8, "kv_tokens": 4096}
    return EmbeddedEngine(folder, **{**settings, **changes})


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None


def collect(engine: EmbeddedEngine, results: dict[int, Result], steps: int | None = None) -> dict[int, Result]:
    """Step until nothing is left (or `steps` times) and gather what each request got."""
    done = 0
    while engine.has_work and done != steps:
        for number, chunk in engine.step():
            result = results.setdefault(number, Result())
            assert result.reason is None, "a chunk after the last one"
            result.tokens += chunk.token_ids
            result.logprobs += chunk.logprobs
            result.versions += [chunk.version] * len(chunk.token_ids)
            result.reason = chunk.finish_reason
        done += 1
    return results


def sample_all(engine: EmbeddedEngine, prompts: list[list[int]], **params) -> list[Result]:
    """Submit all prompts at once and run them to the end."""
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params}))
    results = collect(engine, {})
    return [results[number] for number in range(len(prompts))]


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def teacher_forced(model: PreTrainedModel, row: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of every token but the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
