"""From Hugging Face named tensors to the fused weights of the forward pass.

What is folded into the copies, so that a step has fewer operations (all exact up to rounding):
- the weight of an RMSNorm, and its factor sqrt(hidden), into the columns of the product that follows it;
- 1/sqrt(head_dim) of the attention scores into the query rows (or into the query norm, where there is one);
- the rotary pairs (i, i + head_dim/2) become neighbours, so that a rotation is one complex product;
- query heads are ordered group first, [groups, kv_heads], the order in which attention returns them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from aglite.engine.embedded.architecture import Architecture
from aglite.engine.embedded.model import Layer, Model
from aglite.errors import EngineError

Named = Iterable[tuple[str, torch.Tensor]]


def read_folder(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model folder's safetensors files, one at a time. Raises EngineError when there are none."""
    from safetensors import safe_open

    folder = Path(model_dir)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        if not (folder / file).exists():
            raise EngineError(f"{folder} has no {file}", "fetch the model again, as safetensors")
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


class Loader:
    """Fills a model's fused weights, layer by layer as soon as a layer's tensors are complete."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.arch = model.arch
        self.top = ["embed_tokens.weight", "norm.weight"] + ([] if self.arch.tied else ["lm_head.weight"])
        self.names = _layer_names(self.arch)

    @torch.inference_mode()
    def load(self, named: Named) -> None:
        """Read every tensor of the model from (HF name, tensor) pairs in any order; nothing is kept of the arguments.

        Raises EngineError if a tensor is missing, unknown or of another shape; the weights are then partly replaced.
        """
        top: dict[str, torch.Tensor] = {}
        layers: dict[int, dict[str, torch.Tensor]] = {}
        done: set[int] = set()
        for full_name, tensor in named:
            name = full_name.removeprefix("model.")
            if name in self.top:
                top[name] = tensor
            elif name.startswith("layers."):
                number, _, part = name.removeprefix("layers.").partition(".")
                shape = self.names.get(part)
                if part.endswith("rotary_emb.inv_freq"):
                    continue
                if shape is None or int(number) >= self.arch.layers or tuple(tensor.shape) != shape:
                    raise self._misfit(full_name, tensor, shape)
                parts = layers.setdefault(int(number), {})
                parts[part] = tensor
                if len(parts) == len(self.names):
                    self._set_layer(self.model.layers[int(number)], layers.pop(int(number)))
                    done.add(int(number))
            elif not (name == "lm_head.weight" or name.endswith("inv_freq")):
                raise self._misfit(full_name, tensor, None)
        missing = [name for name in self.top if name not in top]
        for number in sorted(set(range(self.arch.layers)) - done):
            missing += [f"layers.{number}.{part}" for part in self.names if part not in layers.get(number, {})]
        if missing:
            raise EngineError(
                f"{len(missing)} tensors are missing for {self.arch.name}, such as {missing[0]}",
                "give every tensor of the model; check that its config.json belongs to its weights",
            )
        self._set_top(top)

    def _misfit(self, name: str, tensor: torch.Tensor, expected: tuple[int, ...] | None) -> EngineError:
        wanted = f"expected {list(expected)}" if expected else "the model has no such tensor"
        return EngineError(
            f"tensor {name} {list(tensor.shape)} does not fit {self.arch.name}: {wanted}",
            "check that the model's config.json belongs to its weights",
        )

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.model.device, torch.float32)

    def _set_top(self, top: dict[str, torch.Tensor]) -> None:
        embedding = self._own(top["embed_tokens.weight"])
        if tuple(embedding.shape) != tuple(self.model.embedding.shape):
            raise self._misfit("embed_tokens.weight", embedding, tuple(self.model.embedding.shape))
        self.model.embedding.copy_(embedding)
        head = embedding if self.arch.tied else self._own(top["lm_head.weight"])
        self.model.head.set(head * self._norm(top["norm.weight"]))

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        return self._own(weight) * math.sqrt(self.arch.hidden)

    def _set_layer(self, layer: Layer, raw: dict[str, torch.Tensor]) -> None:
        arch = self.arch
        part = {name: self._own(tensor) for name, tensor in raw.items()}
        scale = arch.head_dim**-0.5
        query, key = ({}, {})
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in part:
                rows = self._pairs(part[f"self_attn.q_proj.{kind}"], arch.heads)
                rows = rows.view(arch.kv_heads, arch.groups, arch.head_dim, -1).transpose(0, 1).flatten(0, 2)
                query[kind] = rows if arch.qk_norm else rows * scale
                key[kind] = self._pairs(part[f"self_attn.k_proj.{kind}"], arch.kv_heads)
        fused = torch.cat((query["weight"], key["weight"], part["self_attn.v_proj.weight"]))
        bias = None
        if arch.qkv_bias:
            bias = torch.cat((query["bias"].flatten(), key["bias"].flatten(), part["self_attn.v_proj.bias"]))
        layer.qkv.set(fused.mul_(self._norm(part["input_layernorm.weight"])), bias)
        if arch.qk_norm:
            root = math.sqrt(arch.head_dim)
            of_query = self._pairs(part["self_attn.q_norm.weight"], 1).flatten() * (root * scale)
            of_key = self._pairs(part["self_attn.k_norm.weight"], 1).flatten() * root
            layer.qk_scale = torch.cat((of_query.expand(arch.heads, -1), of_key.expand(arch.kv_heads, -1)))
        out = part["self_attn.o_proj.weight"].view(arch.hidden, arch.kv_heads, arch.groups, arch.head_dim)
        layer.out.set(out.transpose(1, 2).flatten(1), part.get("self_attn.o_proj.bias"))
        after = self._norm(part["post_attention_layernorm.weight"])
        fused = torch.cat((part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"])).mul_(after)
        bias = torch.cat((part["mlp.gate_proj.bias"], part["mlp.up_proj.bias"])) if arch.mlp_bias else None
        layer.gate_up.set(fused, bias)
        layer.down.set(part["mlp.down_proj.weight"], part.get("mlp.down_proj.bias"))

    def _pairs(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows [heads * head_dim, ...] with row i and i + head_dim/2 of each head made neighbours."""
        half = self.arch.head_dim // 2
        return rows.reshape(heads, 2, half, -1).transpose(1, 2).reshape(heads * half * 2, -1)


def _layer_names(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one layer."""
    query, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    names: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (arch.hidden,),
        "post_attention_layernorm.weight": (arch.hidden,),
    }
    for part, out, inner, bias in (
        ("self_attn.q_proj", query, arch.hidden, arch.qkv_bias),
        ("self_attn.k_proj", kv, arch.hidden, arch.qkv_bias),
        ("self_attn.v_proj", kv, arch.hidden, arch.qkv_bias),
        ("self_attn.o_proj", arch.hidden, query, arch.out_bias),
        ("mlp.gate_proj", arch.intermediate, arch.hidden, arch.mlp_bias),
        ("mlp.up_proj", arch.intermediate, arch.hidden, arch.mlp_bias),
        ("mlp.down_proj", arch.hidden, arch.intermediate, arch.mlp_bias),
    ):
        names[f"{part}.weight"] = (out, inner)
        if bias:
            names[f"{part}.bias"] = (out,)
    if arch.qk_norm:
        names["self_attn.q_norm.weight"] = names["self_attn.k_norm.weight"] = (arch.head_dim,)
    return names
