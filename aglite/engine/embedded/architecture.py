"""What a Hugging Face `config.json` says about a model, for the families that the embedded engine can run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from aglite.errors import EngineError

SUPPORTED = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(slots=True, frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    rope: dict

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def rotations(self, length: int) -> torch.Tensor:
        """Complex rotations e^(i * position * frequency), [length, head_dim / 2].

        Angles are rounded to float32 as transformers does, so that both agree at large positions.
        """
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inverse_frequencies())
        return torch.complex(angles.cos(), angles.sin())

    def _inverse_frequencies(self) -> torch.Tensor:
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        inverse = 1.0 / (self.rope["rope_theta"] ** steps)
        kind = self.rope.get("rope_type", "default")
        if kind == "linear":
            return inverse / self.rope["factor"]
        if kind == "llama3":
            return _llama3_frequencies(inverse, self.rope)
        return inverse


def _llama3_frequencies(inverse: torch.Tensor, rope: dict) -> torch.Tensor:
    """Llama 3.1: slow rotations are divided by `factor`, fast ones kept, those between interpolated."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > context / low, inverse / factor, inverse)
    return torch.where((wavelength <= context / low) & (wavelength >= context / high), between, scaled)


def read_architecture(model_dir: Path) -> Architecture:
    """Read `config.json`. Raises EngineError for a folder without one and for models that this engine cannot run."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise EngineError(f"{model_dir} has no config.json", "give a Hugging Face model folder") from error
    except json.JSONDecodeError as error:
        raise EngineError(f"{path} is not valid JSON: {error}", "fetch the model again") from error
    name = (config.get("architectures") or ["unnamed"])[0]
    if name not in SUPPORTED:
        raise EngineError(
            f"the embedded engine cannot run the architecture {name}",
            f"use a model of one of: {', '.join(SUPPORTED)}",
        )
    family = SUPPORTED[name]
    _refuse_variants(name, config)
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        name=name,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        max_positions=config.get("max_position_embeddings", 2048),
        rope=_rope(name, config),
    )


def _refuse_variants(name: str, config: dict) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{name} with hidden_act {config['hidden_act']!r} is not supported", "use a model with silu")
    if config.get("use_sliding_window"):
        raise EngineError(f"{name} with sliding-window attention is not supported", "use a model without it")
    if config.get("quantization_config"):
        raise EngineError(f"{name} is quantized, which cannot be trained", "use the unquantized model")


def _rope(name: str, config: dict) -> dict:
    """Rotary parameters in the form of transformers 5 (`rope_parameters`), also from older files."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise EngineError(
            f"{name} with rope type {rope['rope_type']!r} is not supported",
            "use a model with default, linear or llama3 rotary positions",
        )
    return rope
