"""The sizes of a model, read from its config.json: parameters, cache per token, modules that take an adapter.

Counted as `transformers` 5 builds the models; a test compares each family with the real classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from aglite.model_folder import ModelError, text_of

Kind = Literal["full_attention", "linear_attention"]

KNOWN = (
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
"""Values of `model_type` whose sizes are known."""
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Those with linear attention in most layers and gated softmax attention in the others."""

FP32 = 4


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix that an adapter can be given."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model: its linear modules, and how many parameters it has besides (norms, experts, ...)."""

    kind: Kind
    linears: tuple[Linear, ...]
    other: int

    @property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.other


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a causal language model; `vision` is the tower of a model that also reads pictures."""

    hidden: int
    vocabulary: int
    tied: bool
    """Whether the head uses the embedding's weights."""
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    gated: bool
    """Whether attention's output goes through a gate, as in Qwen3-Next and Qwen3.5."""
    wide_norm: bool
    """Whether norms multiply by their weight in fp32 (Qwen3-Next, Qwen3.5), not in the type of the pass."""
    mlp: int
    """Width of the feed-forward part that one token goes through; with experts, of all that it is sent to."""
    positions: int
    """Tokens that the model was made for."""
    longest: int
    """Tokens that vLLM lets a context have at most: more than `positions` where rotary positions are stretched."""
    layers: tuple[Layer, ...]
    linear_heads: int = 0
    """Linear attention: value heads."""
    linear_key_dim: int = 0
    """Linear attention: size of a key."""
    linear_values: int = 0
    """Linear attention: value heads times their size."""
    linear_channels: int = 0
    """Linear attention: channels of its convolution (queries, keys and values)."""
    linear_state: int = 0
    """Linear attention: entries of one layer's recurrent state of one sequence."""
    linear_window: int = 0
    """Linear attention: steps that the convolution looks back."""
    vision: tuple[Linear, ...] = ()
    vision_other: int = 0

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters of embedding, head and last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def vision_parameters(self) -> int:
        return sum(linear.parameters for linear in self.vision) + self.vision_other

    @property
    def parameters(self) -> int:
        return self.outside + self.vision_parameters + sum(layer.parameters for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters for layer in self.layers)

    def count(self, kind: Kind) -> int:
        return sum(layer.kind == kind for layer in self.layers)

    def lora_parameters(self, rank: int, targets: Iterable[str] = ()) -> int:
        """Parameters of a low-rank adapter: rank * (inputs + outputs) for each linear module named in `targets`;
        without targets, for all of them but the head and those of the vision tower. A target may say where the module
        is, as in `self_attn.q_proj`. (Hu et al. 2021, section 4.1:
        W + B A, with A [rank, inputs] and B [outputs, rank].)"""
        wanted = {target.rpartition(".")[2] for target in targets}
        modules = [linear for layer in self.layers for linear in layer.linears]
        return sum(rank * (one.inputs + one.outputs) for one in modules if not wanted or one.name in wanted)

    def kv_bytes_per_token(self, width: int) -> int:
        """Key and value of every full-attention layer, `width` bytes a number."""
        return 2 * self.count("full_attention") * self.kv_heads * self.head_dim * width

    def state_bytes(self, width: int) -> int:
        """What linear attention keeps of one sequence, however long: the last inputs of the convolution, `width` bytes
        a number, and the recurrent state in fp32 (`mamba_ssm_dtype` of Qwen3.5's config)."""
        convolution = self.linear_channels * self.linear_window * width
        return self.count("linear_attention") * (convolution + self.linear_state * FP32)


def kv_bytes_per_token(config: dict[str, Any], width: int) -> int:
    """Key and value of one token in a cache of `width` bytes a number, of any model that a config.json describes. In a
    family whose layers are not known, each of them counts; 0 where the sizes go by other names."""
    try:
        return read_shape(config).kv_bytes_per_token(width)
    except ModelError:
        text = text_of(config)
    try:
        _, kv_heads, size = _attention_sizes(text)
        return 2 * text["num_hidden_layers"] * kv_heads * size * width
    except KeyError:
        return 0


def read_shape(config: dict[str, Any]) -> Shape:
    """The sizes that a config.json says. Raises ModelError where its family is not known, or a size is missing."""
    kind = str(config.get("model_type"))
    if kind not in KNOWN:
        raise ModelError(
            f"the memory that a model of type {kind!r} takes cannot be planned",
            f"known are {', '.join(KNOWN)}; the run itself may work",
        )
    try:
        return _shape(text_of(config), kind.removesuffix("_text"), config.get("vision_config") or {})
    except KeyError as error:
        raise ModelError(f"config.json does not say {error}", "give the model's own config.json") from None


def _attention_sizes(text: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, those of keys and values, and the size of a head."""
    heads = text["num_attention_heads"]
    return heads, text.get("num_key_value_heads") or heads, text.get("head_dim") or text["hidden_size"] // heads


def _shape(text: dict[str, Any], kind: str, vision: dict[str, Any]) -> Shape:
    hidden = text["hidden_size"]
    heads, kv_heads, head_dim = _attention_sizes(text)
    hybrid = kind in HYBRID
    return Shape(
        hidden=hidden,
        vocabulary=text["vocab_size"],
        tied=bool(text.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=kind.startswith("qwen3"),
        gated=hybrid,
        wide_norm=hybrid,
        mlp=max(_mlp_width(text, kind, index) for index in range(text["num_hidden_layers"])),
        positions=text["max_position_embeddings"],
        longest=_longest(text),
        layers=tuple(_layer(text, kind, index) for index in range(text["num_hidden_layers"])),
        vision=_vision_linears(vision) if vision else (),
        vision_other=_vision_other(vision) if vision else 0,
        **(_linear_sizes(text) if hybrid else {}),
    )


def _longest(text: dict[str, Any]) -> int:
    """vLLM's versions differ in whether YaRN's `max_position_embeddings` are stretched already: the larger one."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    each = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # of each kind of layer
    stretched = max(one.get("factor") or 1.0 for one in each) * text["max_position_embeddings"]
    return max(int(stretched), text.get("model_max_length") or 0)


def _linear_sizes(text: dict[str, Any]) -> dict[str, int]:
    """The fields of Shape about linear attention."""
    heads, key = text["linear_num_value_heads"], text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    return {
        "linear_heads": heads,
        "linear_key_dim": key,
        "linear_values": values,
        "linear_channels": 2 * text["linear_num_key_heads"] * key + values,
        "linear_state": values * key,
        "linear_window": text["linear_conv_kernel_dim"] - 1,
    }


def _layer(text: dict[str, Any], kind: str, index: int) -> Layer:
    hidden = text["hidden_size"]
    where = _kind_of(text, kind, index)
    linears, other = _attention(text, kind) if where == "full_attention" else _linear_attention(text, kind)
    mlp, experts = _mlp(text, kind, index)
    return Layer(where, (*linears, *mlp), other + experts + 2 * hidden)


def _kind_of(text: dict[str, Any], kind: str, index: int) -> Kind:
    if kind not in HYBRID:
        return "full_attention"
    if text.get("layer_types"):
        return text["layer_types"][index]
    return "full_attention" if (index + 1) % text.get("full_attention_interval", 4) == 0 else "linear_attention"


def _attention(text: dict[str, Any], kind: str) -> tuple[list[Linear], int]:
    """Linear modules of softmax attention, and the parameters of its norms."""
    hidden = text["hidden_size"]
    heads, kv_heads, size = _attention_sizes(text)
    kv = kv_heads * size
    bias = {"qwen2": True, "qwen2_moe": text.get("qkv_bias", True)}.get(kind, text.get("attention_bias", False))
    gate = 2 if kind in HYBRID else 1
    linears = [
        Linear("q_proj", hidden, heads * size * gate, bias),
        Linear("k_proj", hidden, kv, bias),
        Linear("v_proj", hidden, kv, bias),
        Linear("o_proj", heads * size, hidden, bias and not kind.startswith("qwen2")),
    ]
    return linears, 2 * size if kind.startswith("qwen3") else 0


def _linear_attention(text: dict[str, Any], kind: str) -> tuple[list[Linear], int]:
    """The same of a gated delta net: projections; convolution, decay and step of each value head, norm."""
    hidden, heads, size = text["hidden_size"], text["linear_num_value_heads"], text["linear_value_head_dim"]
    values = heads * size
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    if kind == "qwen3_next":
        into = [
            Linear("in_proj_qkvz", hidden, channels + values),
            Linear("in_proj_ba", hidden, 2 * heads),
        ]
    else:
        into = [
            Linear("in_proj_qkv", hidden, channels),
            Linear("in_proj_z", hidden, values),
            Linear("in_proj_b", hidden, heads),
            Linear("in_proj_a", hidden, heads),
        ]
    other = channels * text["linear_conv_kernel_dim"] + 2 * heads + size
    return [*into, Linear("out_proj", values, hidden)], other


def _is_sparse(text: dict[str, Any], kind: str, index: int) -> bool:
    if kind == "qwen3_5_moe":
        return True
    if kind not in ("qwen2_moe", "qwen3_moe", "qwen3_next") or not text["num_experts"]:
        return False
    return index not in (text.get("mlp_only_layers") or ()) and (index + 1) % text.get("decoder_sparse_step", 1) == 0


def _mlp(text: dict[str, Any], kind: str, index: int) -> tuple[list[Linear], int]:
    """Linear modules of the feed-forward part, and the parameters of its experts, which are no linear modules."""
    hidden = text["hidden_size"]
    if not _is_sparse(text, kind, index):
        return _gated_mlp(hidden, text["intermediate_size"], bool(text.get("mlp_bias", False) and kind == "llama")), 0
    experts = text["num_experts"] * (3 * hidden * text["moe_intermediate_size"] + hidden)
    if kind == "qwen3_moe":
        return [], experts
    shared = _gated_mlp(hidden, text["shared_expert_intermediate_size"], False)
    return [*shared, Linear("shared_expert_gate", hidden, 1)], experts


def _gated_mlp(hidden: int, width: int, bias: bool) -> list[Linear]:
    return [
        Linear("gate_proj", hidden, width, bias),
        Linear("up_proj", hidden, width, bias),
        Linear("down_proj", width, hidden, bias),
    ]


def _mlp_width(text: dict[str, Any], kind: str, index: int) -> int:
    if not _is_sparse(text, kind, index):
        return text["intermediate_size"]
    shared = 0 if kind == "qwen3_moe" else text["shared_expert_intermediate_size"]
    return text["num_experts_per_tok"] * text["moe_intermediate_size"] + shared


def _vision_linears(vision: dict[str, Any]) -> tuple[Linear, ...]:
    """Linear modules of Qwen3.5's vision tower."""
    hidden, width = vision["hidden_size"], vision["intermediate_size"]
    block = [
        Linear("qkv", hidden, 3 * hidden, True),
        Linear("proj", hidden, hidden, True),
        Linear("linear_fc1", hidden, width, True),
        Linear("linear_fc2", width, hidden, True),
    ]
    merged = hidden * vision["spatial_merge_size"] ** 2
    merger = [Linear("linear_fc1", merged, merged, True), Linear("linear_fc2", merged, vision["out_hidden_size"], True)]
    return (*block * vision["depth"], *merger)


def _vision_other(vision: dict[str, Any]) -> int:
    """Its norms, its positions and the projection of patches."""
    hidden = vision["hidden_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    norms = (2 * vision["depth"] + 1) * 2 * hidden
    return norms + vision["num_position_embeddings"] * hidden + patch * hidden + hidden
