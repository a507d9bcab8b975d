"""Sizes read from a config.json equal those of the model that `transformers` makes of it."""

import pytest
from memory_configs import (
    DELTA,
    QWEN3_4B,
    QWEN25_15B,
    QWEN35_9B,
    QWEN35_9B_CHECKPOINT_BYTES,
    SMOLLM2_135M,
)

from aglite.memory_plan.shape import Linear, kv_bytes_per_token, read_shape
from aglite.model_folder import ModelError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 300,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
FAMILIES = {
    "llama": SMALL,
    "llama, biases": {**GROUPED, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied": {**GROUPED, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "qwen3": GROUPED,
    "qwen3, biases": {**GROUPED, "model_type": "qwen3", "attention_bias": True},
    "qwen2_moe": {**SMALL, "num_key_value_heads": 2, **EXPERTS, "decoder_sparse_step": 2},
    "qwen3_moe": {**GROUPED, **EXPERTS, "mlp_only_layers": [1]},
    "qwen3_next": {**GROUPED, **EXPERTS, **DELTA},
    "qwen3_5_text": {**GROUPED, **DELTA},
    "qwen3_5_moe_text": {**GROUPED, **EXPERTS, **DELTA},
}
REAL = {"SmolLM2-135M": SMOLLM2_135M, "Qwen2.5-1.5B": QWEN25_15B, "Qwen3-4B": QWEN3_4B, "Qwen3.5-9B": QWEN35_9B}


def on_meta(config):
    """The model of a configuration, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = config["model_type"]
    made = AutoConfig.for_model(kind, **{key: value for key, value in config.items() if key != "model_type"})
    family = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return family.from_config(made)


@pytest.mark.parametrize("name", [*FAMILIES, *REAL])
def test_parameters_equal_those_of_the_real_class(name):
    config = REAL.get(name) or {"model_type": name, **FAMILIES[name]}
    model = on_meta(config)
    assert read_shape(config).parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", [*FAMILIES, *REAL])
def test_the_modules_that_take_an_adapter_are_the_linear_ones_but_the_head(name):
    import torch

    config = REAL.get(name) or {"model_type": name, **FAMILIES[name]}
    shape = read_shape(config)
    found = sorted(
        (path.rpartition(".")[2], module.in_features, module.out_features, module.bias is not None)
        for path, module in on_meta(config).named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    )
    ours = [*shape.vision, *(one for layer in shape.layers for one in layer.linears)]
    assert sorted((one.name, one.inputs, one.outputs, one.bias) for one in ours) == found


def test_published_sizes():
    """What the hub says of the four: parameters of the checkpoints."""
    assert read_shape(SMOLLM2_135M).parameters == 134_515_008
    assert read_shape(QWEN25_15B).parameters == 1_543_714_304
    assert read_shape(QWEN3_4B).parameters == 4_022_468_096
    shape, text = read_shape(QWEN35_9B), QWEN35_9B["text_config"]
    # the layer that predicts a second token: a projection of two hidden states, a full-attention layer, three norms
    mtp = 2 * text["hidden_size"] ** 2 + shape.layers[3].parameters + 3 * text["hidden_size"]
    # of linear attention, the decay of each head and the norm are stored in fp32
    wider = shape.count("linear_attention") * (text["linear_num_value_heads"] + text["linear_value_head_dim"])
    assert 2 * (shape.parameters + mtp + wider) == QWEN35_9B_CHECKPOINT_BYTES


def test_an_adapter_has_rank_times_inputs_and_outputs():
    shape = read_shape({"model_type": "qwen3", **GROUPED})
    assert shape.lora_parameters(8, ["q_proj"]) == 4 * 8 * (64 + 128)
    assert shape.lora_parameters(8) == 4 * 8 * ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 3 * (64 + 96))
    assert Linear("q", 3, 5, bias=True).parameters == 20


def test_cache_of_a_token_and_state_of_a_sequence():
    assert read_shape(QWEN25_15B).kv_bytes_per_token(2) == 28 * 1024
    assert read_shape(QWEN3_4B).kv_bytes_per_token(2) == 144 * 1024
    shape = read_shape(QWEN35_9B)
    assert shape.kv_bytes_per_token(2) == 32 * 1024, "8 of its 32 layers have a cache"
    assert shape.state_bytes(2) == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert read_shape(QWEN3_4B).state_bytes(2) == 0


def test_the_cache_of_any_model():
    for config in REAL.values():
        assert kv_bytes_per_token(config, 2) == read_shape(config).kv_bytes_per_token(2)
    other = {**QWEN3_4B, "model_type": "mistral"}
    assert kv_bytes_per_token(other, 2) == 144 * 1024
    assert kv_bytes_per_token({"model_type": "gemma3", "text_config": other}, 4) == 2 * 144 * 1024
    assert kv_bytes_per_token({"model_type": "gpt2", "n_layer": 12}, 4) == 0


def test_what_is_not_known_is_said():
    with pytest.raises(ModelError, match="'gpt2' takes cannot be planned"):
        read_shape({"model_type": "gpt2"})
    with pytest.raises(ModelError, match="does not say 'hidden_size'"):
        read_shape({"model_type": "llama"})
    short = {name: value for name, value in SMALL.items() if name != "max_position_embeddings"}
    with pytest.raises(ModelError, match="does not say 'max_position_embeddings'"):
        read_shape({"model_type": "llama", **short})
