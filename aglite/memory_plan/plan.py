"""What each phase of a run will hold on a GPU, by owner, and what that leaves for rollouts.

Weights and caches follow from the model's sizes. Training follows from how aglite trains (`aglite.worker.verl_worker`):
FSDP2 in mixed precision. P parameters, T of them trained, b bytes of a number in a pass:

    weights      4 P in fp32; with an adapter b (P - T) for the frozen ones and 4 T for the adapter
    gradients    4 T, in fp32 as FSDP2 reduces them
    optimizer    8 T: the two moments of AdamW in fp32 (Rajbhandari et al. 2020, "ZeRO", section 3.1)
    gathered     b (embedding, head and two layers): the copies that a pass computes with. FSDP2 frees those of a layer
                 after it and fetches the next one meanwhile; with tied weights the embedding stays throughout.
                 And 4 for the gradients of a layer, while they are reduced
    last         instead of these and a pass, when it has ended: the gradients of embedding or head, b bytes, and twice
                 4 to reduce them, while those of a layer are still being reduced; with tied weights at least three
                 times b, since both are there and their sum
    reference    nothing beside the gathered copies: it is kept in host memory. With an adapter, nothing at all

vLLM takes `gpu_memory_utilization` of the card beside its own CUDA context, and gives its KV cache what weights, one
pass of the largest batch, workspaces and CUDA graphs leave of that (`vllm/v1/worker/gpu_worker.py` of 0.24.0,
`determine_available_memory`). Asleep it keeps its context, workspaces and graphs.

CONTEXT, WORKSPACES, GRAPHS and SLACK are estimates; `aglite doctor --selftest gpu` compares with what a card says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aglite.config import Recipe
from aglite.config.vllm_flags import BATCHED, PARALLEL, count
from aglite.memory_plan.passes import pass_bytes
from aglite.memory_plan.shape import FP32, Shape
from aglite.model_folder import CPU_CONTEXT
from aglite.units import gib

GIB = 2**30
MIB = 2**20

RESERVED = 0.01
"""Share of a card that no program gets: an A100 of 80 GiB gives 79.2."""
CONTEXT = 600 * MIB
"""CUDA's own, of every process."""
WORKSPACES = 400 * MIB
"""vLLM's, for its attention kernels and cuBLAS."""
GRAPHS = 800 * MIB
"""vLLM's CUDA graphs."""
SLACK = 0.05
"""Of what a pass holds: memory that torch's allocator cannot use because of how it is divided."""
BATCHED_TOKENS = 8192
"""Tokens that vLLM computes at once, where `--max-num-batched-tokens` does not say it (2048 on an A100)."""
SAMPLER = 20
"""Bytes that vLLM's sampler takes for each logit: in fp32, sorted, and as log-probabilities."""
TRANSFER = 256 * MIB
"""The buffer in which weights go from trainer to vLLM, or the largest matrix (`aglite.worker.parcels`)."""
PROCESS = 3 * GIB
"""Host memory of a process with torch and CUDA."""

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes on a card by owner, at the most that this phase holds at once."""

    name: str
    held: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe takes of a card of `card` bytes. It fits if there are no `problems`."""

    card: int
    parameters: int
    trained: int
    """Parameters that are trained: all, or those of the adapter."""
    phases: tuple[Phase, ...]
    host: dict[str, int]
    """Bytes of host memory by owner, at the most."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    context_length: int
    rollouts: int
    """Generations of the whole context length that are possible at once."""
    problems: tuple[str, ...]

    @property
    def usable(self) -> int:
        return int(self.card * (1 - RESERVED))

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "card_bytes": self.card,
            "usable_bytes": self.usable,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "phases": {phase.name: {**phase.held, "total": phase.total} for phase in self.phases},
            "peak": self.peak.name,
            "host_bytes": self.host,
            "kv_tokens": self.kv_tokens,
            "context_length": self.context_length,
            "concurrent_rollouts": self.rollouts,
            "problems": list(self.problems),
        }


def make_plan(recipe: Recipe, shape: Shape, card: int, *, others: int = 0, host_memory: int = 0) -> Plan:
    """The plan for a card of `card` bytes, `others` of which other programs hold. `host_memory`: bytes of the machine;
    0: not looked at."""
    context = context_length(recipe, shape)
    trainer = Trainer(recipe, shape, *micro_batch(recipe, shape, context))
    if recipe.engine.kind == "embedded":
        phases, kv = _embedded(recipe, shape, trainer)
        per_token, per_sequence = shape.kv_bytes_per_token(FP32), 0
    else:
        phases, kv = _with_vllm(recipe, shape, trainer, card)
        width, parallel = _vllm_width(recipe), tensor_parallel(recipe)
        per_token = shape.kv_bytes_per_token(width) // min(parallel, shape.kv_heads)
        per_sequence = shape.state_bytes(width) // parallel
    if others:
        phases = [Phase(phase.name, {**phase.held, "other programs": others}) for phase in phases]
    rollouts = max(0, kv) // (context * per_token + per_sequence)
    tokens = max(0, kv - min(rollouts, recipe.engine.max_running) * per_sequence) // per_token
    host = {name: held for name, held in trainer.host().items() if held}
    plan = Plan(card, shape.parameters, trainer.trained, tuple(phases), host, tokens, context, rollouts, ())
    return replace(plan, problems=(*_contradictions(recipe, shape, plan), *_problems(plan, kv, host_memory)))


def context_length(recipe: Recipe, shape: Shape) -> int:
    """Tokens of prompt and response together, as the engine will have them."""
    most = min(CPU_CONTEXT, shape.positions) if recipe.engine.kind == "embedded" else shape.positions
    return recipe.engine.context_length or most


def tensor_parallel(recipe: Recipe) -> int:
    """GPUs that one copy of the model is spread over in vLLM."""
    return count(recipe.engine.args, PARALLEL) or 1


def _contradictions(recipe: Recipe, shape: Shape, plan: Plan) -> list[str]:
    """What the recipe wants of the model and it has not."""
    found = []
    longest = shape.positions if recipe.engine.kind == "embedded" else shape.longest
    if plan.context_length > longest:
        found.append(f"engine.context_length is {plan.context_length}, and the model was made for {longest} tokens")
    if recipe.trainer.lora and not plan.trained:
        known = ", ".join(dict.fromkeys(linear.name for layer in shape.layers for linear in layer.linears))
        found.append(f"trainer.lora.targets names no module of the model; it has {known}")
    return found


def _problems(plan: Plan, kv: int, host_memory: int) -> tuple[str, ...]:
    found = [
        f"{phase.name} takes {gib(phase.total)} of {gib(plan.usable)}"
        for phase in plan.phases
        if phase.total > plan.usable
    ]
    if plan.rollouts < 1:
        left = f"{plan.kv_tokens} tokens" if kv > 0 else "nothing"
        found.append(f"the KV cache would hold {left}, and one context has {plan.context_length}")
    if host_memory and sum(plan.host.values()) > host_memory:
        found.append(f"host memory: {gib(sum(plan.host.values()))} of {gib(host_memory)}")
    return tuple(found)


class Trainer:
    """What the trainer holds on each card, in bytes, with a largest micro-batch of `tokens`, of which `logits` have
    logits."""

    def __init__(self, recipe: Recipe, shape: Shape, tokens: int, logits: int) -> None:
        settings, lora = recipe.trainer, recipe.trainer.lora
        self.recipe = recipe
        self.shape = shape
        self.cards = settings.n_gpus * settings.nnodes
        # the embedded engine computes in fp32, and unless it is told otherwise the trainer beside it does so, too
        wide = settings.dtype == "float32" or (settings.dtype == "auto" and recipe.engine.kind == "embedded")
        self.width = 4 if wide else 2
        self.trained = shape.lora_parameters(lora.rank, lora.targets) if lora else shape.parameters
        frozen = shape.parameters if lora else 0
        self.weights = self._share(FP32 * self.trained + self.width * frozen)
        self.gradients = self._share(FP32 * self.trained)
        self.optimizer = self._share(2 * FP32 * self.trained)
        self._tokens, self._logits = tokens, logits

    def _share(self, count: int) -> int:
        return -(-count // self.cards)

    @property
    def gathered(self) -> int:
        reducing = 0 if self.recipe.trainer.lora else FP32 * self.shape.largest_layer
        return self.width * (self.shape.outside + 2 * self.shape.largest_layer) + reducing

    @property
    def passing(self) -> int:
        """The most that a pass holds besides weights, gradients and the gathered copies."""
        settings = self.recipe.trainer
        held = pass_bytes(
            self.shape,
            self._tokens,
            self._logits,
            self.width,
            checkpointing=settings.gradient_checkpointing,
            masked=settings.attention != "flash_attention_2" and not self.shape.linear_heads,
        )
        if self.recipe.algorithm.entropy:
            held += 2 * FP32 * self.shape.vocabulary * self._logits  # with its gradient
        return held

    @property
    def last_gradients(self) -> int:
        """What the last gradients of a backward pass take until they are where they belong."""
        shape, width = self.shape, self.width
        if self.recipe.trainer.lora:
            return (width + 2 * FP32) * self.trained
        reduced = (width + 2 * FP32) * shape.embedding
        return max(reduced, 3 * width * shape.embedding if shape.tied else 0) + FP32 * shape.largest_layer

    def training(self) -> dict[str, int]:
        state = {"weights in training": self.weights, "gradients": self.gradients}
        if not self.recipe.trainer.offload_optimizer:
            state["optimizer"] = self.optimizer
        kept = self.width * self.shape.embedding if self.shape.tied else 0
        if self.gathered + self.passing >= kept + self.last_gradients:
            made = {"gathered weights": self.gathered, "activations and logits": self.passing}
        else:
            made = {"gathered weights": kept, "last gradients": self.last_gradients}
        return {**state, **made, "allocator slack": int(SLACK * sum(made.values()))}

    def updating(self) -> dict[str, int]:
        """While the optimizer is applied."""
        return {"weights in training": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}

    def host(self) -> dict[str, int]:
        """Host memory of this node: everything of the trainer while vLLM has the card, the reference, and what vLLM
        keeps there asleep or gets by files."""
        recipe, shape = self.recipe, self.shape
        own, here = recipe.engine.kind != "embedded", min(recipe.trainer.n_gpus, self.cards)
        weights = _vllm_width(recipe) * shape.parameters
        reference = recipe.algorithm.kl > 0 and not recipe.trainer.lora
        offloaded = own or recipe.trainer.offload_optimizer
        return {
            "processes": PROCESS * (here + 1),
            "weights in training": self.weights * here if own else 0,
            "optimizer": self.optimizer * here if offloaded else 0,
            "reference": self.width * shape.parameters * here // self.cards if reference else 0,
            "vLLM asleep": weights if own and sleep_level(recipe) == 1 else 0,
            "weights on their way": weights if own and recipe.engine.transfer == "folder" else 0,
        }


def micro_batch(recipe: Recipe, shape: Shape, context: int) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and how many of them can have logits.

    A sample longer than the budget has a micro-batch of its own, and models with linear attention get one sample at a
    time. A sample has as many trained tokens as its rollout may sample, and no more than it has tokens.
    """
    budget = recipe.trainer.tokens_per_micro_batch
    tokens = context if shape.linear_heads else max(budget, context)
    of_one = min(context, recipe.agent.limits.sampled_tokens)
    return tokens, of_one if shape.linear_heads else min(tokens, max(budget, of_one))


def sleep_level(recipe: Recipe) -> int:
    return recipe.engine.sleep_level or (1 if recipe.trainer.lora else 2)


def _vllm_width(recipe: Recipe) -> int:
    return WIDTHS.get(recipe.engine.dtype, 2)


def _with_vllm(recipe: Recipe, shape: Shape, trainer: Trainer, card: int) -> tuple[list[Phase], int]:
    """vLLM and the trainer take turns: phases, and bytes of the KV cache."""
    engine, width, parallel = recipe.engine, _vllm_width(recipe), tensor_parallel(recipe)
    trains_here = recipe.trainer.device != "cpu"
    contexts = {"CUDA contexts": 2 * CONTEXT if trains_here else CONTEXT}
    fixed = {"vLLM workspaces": WORKSPACES}
    if not engine.enforce_eager:
        fixed["CUDA graphs"] = GRAPHS
    parameters = shape.parameters
    if "--language-model-only" in engine.args:
        parameters -= shape.vision_parameters
    weights = -(-width * parameters // parallel)
    batch = count(engine.args, BATCHED) or max(BATCHED_TOKENS, engine.max_running)
    passing = batch * width * (3 * shape.mlp + 4 * shape.hidden) // parallel
    passing += SAMPLER * shape.vocabulary * engine.max_running
    kv = int(engine.gpu_memory_utilization * card) - weights - passing - sum(fixed.values())
    largest = width * max(shape.embedding, *(one.parameters for one in shape.layers[0].linears))
    asleep = {**contexts, **fixed}
    awake = {**asleep, "vLLM weights": weights, "vLLM activations": passing, "KV cache": max(0, kv)}
    moving = max(TRANSFER, largest) + width * shape.largest_layer
    phases = [
        Phase("rollout", awake),
        Phase("sleeping", asleep),
        Phase("training", {**asleep, **(trainer.training() if trains_here else {})}),
        Phase("update", {**asleep, **(trainer.updating() if trains_here else {})}),
        Phase("syncing", {**asleep, "vLLM weights": weights, "weights on their way": moving}),
    ]
    return phases, kv


def _embedded(recipe: Recipe, shape: Shape, trainer: Trainer) -> tuple[list[Phase], int]:
    """Engine and trainer in one process, both always there. The engine computes in fp32 with fused copies of the
    weights, and has a cache of `engine.kv_tokens`."""
    kv = recipe.engine.kv_tokens * shape.kv_bytes_per_token(FP32)
    engine = {"CUDA contexts": CONTEXT, "engine weights": FP32 * shape.parameters, "KV cache": kv}
    at_rest = {**engine, "weights in training": trainer.weights, "optimizer": trainer.optimizer}
    if recipe.trainer.offload_optimizer:
        del at_rest["optimizer"]
    phases = [
        Phase("rollout", at_rest),
        Phase("training", {**engine, **trainer.training()}),
        Phase("update", {**engine, **trainer.updating()}),
    ]
    return phases, kv
