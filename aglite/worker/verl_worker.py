"""verl's training worker for one model: its FSDP2 engine on a GPU, the same engine unwrapped on a CPU.

What differs from verl's engine is how a micro-batch becomes the model's input and how log-probabilities are read from
its logits (`model_inputs`), on both devices alike. On one CPU there is nothing to shard and no accelerator to copy to,
so the module is not wrapped in FSDP there (at world size 1 the wrap would copy all parameters on every pass and all
gradients after it). What is trained is the same; a test compares it with plain torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers.utils import logging as transformers_logging
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from aglite.errors import AgliteError
from aglite.worker.model_inputs import Layout, layout_for, model_inputs, read_logits
from aglite.worker.whole_weights import whole_weights

VISION = r".*\b(visual|vision_tower|vision_model|multi_modal_projector)\b.*"
"""Modules that a text does not pass, and that get no adapter."""


@dataclass(slots=True, frozen=True)
class Setup:
    """How a model is trained, of a recipe's trainer section, with `auto` resolved."""

    dtype: str
    attention: str
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    lora: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, *, dtype: str, attention: str, **others: Any) -> Setup:
        """Raises AgliteError for flash attention where it cannot be had."""
        on_gpu = get_device_name() == "cuda"
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        installed = importlib.util.find_spec("flash_attn") is not None
        if attention == "auto":
            attention = "flash_attention_2" if on_gpu and installed and dtype == "bfloat16" else "sdpa"
        elif attention == "flash_attention_2" and not (on_gpu and installed):
            raise AgliteError(
                "trainer.attention is flash_attention_2, and "
                + ("the package flash-attn is not installed" if on_gpu else "there is no GPU"),
                "install flash-attn for this torch, or use `attention: sdpa`" if on_gpu else "use `attention: sdpa`",
            )
        return cls(dtype=dtype, attention=attention, **others)


class _Engine(FSDPEngineWithLMHead):
    """verl's engine, with inputs and outputs of our own."""

    layout = Layout()

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return model_inputs(
            micro_batch["input_ids"], micro_batch["response_mask"], micro_batch["temperature"], self.layout
        )

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        entropy, gradient = (
            tu.get_non_tensor_data(data=micro_batch, key=key, default=False)
            for key in ("calculate_entropy", "entropy_gradient")
        )
        return read_logits(output.logits[0], output_args, micro_batch["input_ids"], entropy, gradient)

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """verl gives the adapter the type of the weights it is added to; updates would be lost in 16 bits."""
        module = super()._build_lora_module(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return module


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="nvidia")
class GpuEngine(_Engine):
    pass


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuEngine(_Engine):
    wrapped = False
    """Whether to wrap the module in FSDP2 all the same, as on a GPU."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.wrapped or torch.distributed.get_world_size() > 1:
            return super()._build_fsdp_module(module)
        low = self.engine_config.mixed_precision["param_dtype"] == "bf16"
        self._autocast_dtype = torch.bfloat16 if low else torch.float32  # verl leaves autocast out for float32
        return module


def verl_worker(
    model_dir: Path, optimizer: FSDPOptimizerConfig, setup: Setup, *, reference: bool = False
) -> TinkerTrainingWorker:
    """A worker that holds the model of a folder; `reference`: only to compute log-probabilities with, as it is.

    A reference is kept in host memory on a GPU, and streamed through it layer by layer.
    """
    transformers_logging.disable_progress_bar()
    lora = None if reference else setup.lora
    model = HFModelConfig(
        path=str(model_dir),
        load_tokenizer=False,
        use_remove_padding=False,  # of verl's own inputs
        enable_gradient_checkpointing=setup.gradient_checkpointing and not reference,
        override_config={"attn_implementation": setup.attention},
        lora_rank=lora["rank"] if lora else 0,
        lora_alpha=lora["alpha"] if lora else 1,
        target_modules=(lora["targets"] if lora else None) or "all-linear",
        exclude_modules=VISION if lora and _sees(model_dir) else None,
    )
    compute = "bf16" if setup.dtype == "bfloat16" else "fp32"
    on_gpu = get_device_name() != "cpu"
    # weights that nobody updates need no more bits than they are computed with
    frozen = (on_gpu or CpuEngine.wrapped) and bool(reference or lora)
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        use_dynamic_bsz=False,
        forward_only=reference and on_gpu,  # which keeps the weights in host memory
        optimizer_offload=setup.offload_optimizer and not reference,
        model_dtype=compute if frozen else "fp32",
        mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    worker = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    try:
        with whole_weights(model_dir):
            worker.reset()
    except ValueError as error:
        if lora and "target" in str(error).lower():
            raise AgliteError(
                f"trainer.lora.targets: {model_dir} has no module of such a name ({error})",
                "name linear modules of the model, such as q_proj, or leave `targets` out",
            ) from None
        raise
    worker.engine.layout = layout_for(worker.engine.module, setup.attention)
    return worker


def _sees(model_dir: Path) -> bool:
    return "vision_config" in json.loads((model_dir / "config.json").read_text())
