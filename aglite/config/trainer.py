"""The section `trainer` of a recipe: how and on what the weights are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from aglite.config.sections import NonNegative, Positive, Section

if TYPE_CHECKING:
    from aglite.config.recipe import Recipe

OUTSIDE_LAYERS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
"""Modules that no adapter can be given: they may share their weights with each other, and a merge would change both."""


class Lora(Section):
    rank: Positive = 16
    """Rank of the two matrices whose product is added to a weight."""
    alpha: Positive = 32
    """The product is added `alpha / rank` times."""
    targets: list[str] = []
    """Names of the modules that get an adapter, such as `q_proj`; default: every linear one but the head."""


class Trainer(Section):
    steps: Positive = 10
    """Training steps of the run."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of AdamW, at its highest."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after `warmup_steps`: stay, or fall towards 0, along a line or half a cosine, until
    the last of `steps`. A run that goes on with other `steps` follows the schedule of that many."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's running means of the gradient and of its square."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """The gradient's norm is cut to this."""
    tokens_per_micro_batch: Positive = 1024
    """Tokens that one forward and backward pass may hold, on each device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the weights are trained, and where the embedded engine samples; `auto`: on an NVIDIA GPU where torch sees
    one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What a pass computes in. With `bfloat16`, weights and optimizer state stay float32, and so do log-probabilities
    and losses. `auto`: bfloat16 on a GPU; float32 on the CPU, and wherever the embedded engine samples, which computes
    in float32."""
    gradient_checkpointing: bool = False
    """Keep the input of each layer only and compute the rest again in the backward pass: about a third more time, much
    less memory."""
    offload_optimizer: bool = False
    """On a GPU, keep the optimizer's state in host memory except while it is applied."""
    attention: Literal["auto", "flash_attention_2", "sdpa"] = "auto"
    """How attention is computed. `sdpa` computes a prefix that several samples share once, and holds a mask of the
    micro-batch's tokens squared; `flash_attention_2` (the package flash-attn) computes every sample whole and holds
    none. `auto`: flash attention on a GPU in bfloat16 where it is installed, otherwise sdpa."""
    lora: Lora | None = None
    """Train a low-rank adapter and leave the weights alone; default: train all of them."""
    n_gpus: Positive = 1
    """GPUs of each machine that the weights are trained on."""
    nnodes: Positive = 1
    """Machines that they are trained on; Ray has to run on all of them."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints; the last step and a clean stop always write one."""
    keep_last: Positive = 2
    """Checkpoints kept besides the best: the one that did best in validation, which is written when it is evaluated."""
    min_free_disk_mb: NonNegative = 2048
    """Below this much free disk the run pauses and says so."""


def trainer_problems(trainer: Trainer, recipe: Recipe) -> list[str]:
    """What the section contradicts."""
    problems = []
    if trainer.lr_schedule != "constant" and trainer.warmup_steps >= trainer.steps:
        problems.append(
            f"trainer.warmup_steps: {trainer.warmup_steps} of {trainer.steps} steps leave none for the "
            f"{trainer.lr_schedule} schedule; use fewer, or `lr_schedule: constant`"
        )
    if trainer.attention == "flash_attention_2" and trainer.device == "cpu":
        problems.append("trainer.attention: flash_attention_2 needs a GPU, and device is cpu; use `attention: sdpa`")
    if trainer.attention == "flash_attention_2" and trainer.dtype == "float32":
        problems.append(
            "trainer.attention: flash_attention_2 computes in 16 bits, and dtype is float32; use `attention: sdpa`, or "
            "`dtype: bfloat16`"
        )
    if trainer.offload_optimizer and trainer.device == "cpu":
        problems.append(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory anyway; leave it out"
        )
    for name in trainer.lora.targets if trainer.lora else ():
        if name in OUTSIDE_LAYERS:
            problems.append(f"trainer.lora.targets: {name} can have no adapter; name linear modules of the layers only")
    devices = trainer.n_gpus * trainer.nnodes
    if devices > 1 and trainer.device == "cpu":
        key, value = ("n_gpus", trainer.n_gpus) if trainer.n_gpus > 1 else ("nnodes", trainer.nnodes)
        problems.append(f"trainer.{key}: {value}, but device is cpu; leave it out, or use `device: cuda`")
    elif devices > 1 and recipe.engine.kind == "embedded":
        key, value = ("n_gpus", trainer.n_gpus) if trainer.n_gpus > 1 else ("nnodes", trainer.nnodes)
        problems.append(
            f"trainer.{key}: {value}, but the embedded engine shares the weights of one process; use `engine: {{kind: "
            "vllm}`, or leave it out"
        )
    return problems
