"""A low-rank adapter (LoRA, Hu et al. 2021) beside the weights it is added to: W + alpha / rank * B A.

The weights themselves are never touched. Merged ones are computed where they are wanted, one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import save_file

from aglite.worker.checkpoint import ADAPTER
from aglite.worker.sharding import whole


def adapter(module: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's matrices by the names that peft gives them in files."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def merged(module: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the model under its Hugging Face name, with the adapter's product added; tied ones once."""
    base = module.get_base_model()
    layers = {name: layer for name, layer in base.named_modules() if isinstance(layer, Linear)}
    for name, parameter in base.named_parameters():
        if parameter.requires_grad:
            continue
        weight = whole(parameter.detach())
        layer_name, adapted, kind = name.rpartition(".base_layer.")
        if not adapted:
            yield name, weight
            continue
        yield f"{layer_name}.{kind}", _sum(weight, layers[layer_name]) if kind == "weight" else weight


def _sum(weight: torch.Tensor, layer: Linear) -> torch.Tensor:
    a, b = (whole(factor["default"].weight.detach()) for factor in (layer.lora_A, layer.lora_B))
    product = b @ a * layer.scaling["default"]
    return (weight.float() + (product.T if layer.fan_in_fan_out else product)).to(weight.dtype)


def save(folder: Path, tensors: dict[str, torch.Tensor], config: PeftConfig, model_dir: Path) -> None:
    """Write an adapter's whole tensors as peft does, so that peft and vLLM can load it."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / ADAPTER, {"format": "pt"})
    about = config.to_dict() | {"base_model_name_or_path": str(model_dir), "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2, default=sorted))
