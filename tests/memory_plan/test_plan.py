"""What each phase holds, what the cache takes of the rest, and what is advised where a recipe does not fit."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from memory_configs import QWEN3_4B, QWEN25_15B, QWEN35_9B

from aglite.config import load_recipe
from aglite.errors import RecipeError
from aglite.memory_plan import advice as advising
from aglite.memory_plan.advice import advice
from aglite.memory_plan.plan import CONTEXT, GIB, GRAPHS, SAMPLER, WORKSPACES, make_plan, micro_batch
from aglite.memory_plan.shape import read_shape
from aglite.memory_plan.table import advice_lines, table

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "instruct"
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
SETTINGS = (
    "engine.kind=vllm",
    "engine.context_length=4096",
    "engine.max_running=64",
    "agent.limits.sampled_tokens=2048",
    "algorithm.kl=0",
    "trainer.tokens_per_micro_batch=4096",
)


def recipe_with(*settings):
    return load_recipe(RECIPE, [*SETTINGS, *settings])


def plan_for(config, gib, *settings, **options):
    return make_plan(recipe_with(*settings), read_shape(config), gib * GIB, **options)


def held(plan, phase):
    return next(one.held for one in plan.phases if one.name == phase)


def test_full_training_holds_weights_gradients_and_moments_in_fp32():
    size = read_shape(QWEN25_15B).parameters
    plan = plan_for(QWEN25_15B, 80)
    training = held(plan, "training")
    assert training["weights in training"] == training["gradients"] == 4 * size
    assert training["optimizer"] == 8 * size
    assert plan.trained == plan.parameters == size
    assert held(plan, "update") == {
        **held(plan, "sleeping"),
        "weights in training": 4 * size,
        "gradients": 4 * size,
        "optimizer": 8 * size,
    }


FSDP = [
    # vocabulary, tied, tokens, sampled tokens, checkpointing
    (1000, True, 2048, 16, True),
    (1000, True, 2048, 16, False),
    (151936, True, 512, 64, True),
    (151936, False, 2048, 1024, True),
]


def test_the_trainer_holds_what_torch_counts_under_fsdp2():
    """Of four layers at their real width: nothing on the GPU was measured, but every tensor was counted."""
    configs = [
        {**QWEN25_15B, "num_hidden_layers": 4, "vocab_size": vocabulary, "tie_word_embeddings": tied}
        for vocabulary, tied, *_ in FSDP
    ]
    cases = [[config, *rest] for config, (_, _, *rest) in zip(configs, FSDP, strict=True)]
    command = [sys.executable, str(HELPERS / "fsdp_peak.py"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    ratios = []
    for (config, tokens, sampled, checkpointing), counted in zip(cases, json.loads(done.stdout), strict=True):
        settings = [f"engine.context_length={tokens}", f"agent.limits.sampled_tokens={sampled}"]
        settings += [f"trainer.gradient_checkpointing={checkpointing}", f"trainer.tokens_per_micro_batch={sampled}"]
        training = held(plan_for(config, 80, *settings), "training")
        left_out = ("CUDA contexts", "vLLM workspaces", "CUDA graphs", "allocator slack")
        ratios.append(sum(size for owner, size in training.items() if owner not in left_out) / counted)
    assert all(1 <= ratio <= 1.15 for ratio in ratios), ratios


def test_an_adapter_leaves_the_weights_in_16_bits_and_trains_itself_in_fp32():
    shape = read_shape(QWEN35_9B)
    plan = plan_for(QWEN35_9B, 80, "trainer.lora={rank: 32}")
    training = held(plan, "training")
    assert plan.trained == shape.lora_parameters(32)
    assert training["weights in training"] == 2 * shape.parameters + 4 * plan.trained
    assert (training["gradients"], training["optimizer"]) == (4 * plan.trained, 8 * plan.trained)


def test_vllm_and_the_trainer_take_turns():
    plan = plan_for(QWEN3_4B, 80)
    assert [phase.name for phase in plan.phases] == ["rollout", "sleeping", "training", "update", "syncing"]
    trainers = {"weights in training", "gradients", "optimizer", "activations and logits", "gathered weights"}
    for phase in ("rollout", "sleeping", "syncing"):
        assert not trainers & set(held(plan, phase))
    for phase in ("sleeping", "training", "update"):
        assert not {"vLLM weights", "KV cache"} & set(held(plan, phase))
    assert "KV cache" not in held(plan, "syncing"), "it comes back after the weights"
    assert held(plan, "sleeping") == {
        "CUDA contexts": 2 * CONTEXT,
        "vLLM workspaces": WORKSPACES,
        "CUDA graphs": GRAPHS,
    }


def test_the_cache_gets_what_the_share_of_the_card_leaves():
    shape, plan = read_shape(QWEN3_4B), plan_for(QWEN3_4B, 80, "engine.gpu_memory_utilization=0.5")
    rollout = held(plan, "rollout")
    assert sum(rollout.values()) == pytest.approx(40 * GIB + 2 * CONTEXT, abs=8)
    assert rollout["vLLM weights"] == 2 * shape.parameters
    assert plan.kv_tokens == rollout["KV cache"] // (144 * 1024)
    assert plan.rollouts == plan.kv_tokens // 4096
    smaller = plan_for(
        QWEN3_4B, 80, "engine.gpu_memory_utilization=0.5", "engine.args=[--max-num-batched-tokens, '2048']"
    )
    saved = (8192 - 2048) * 2 * (3 * shape.mlp + 4 * shape.hidden)
    assert held(smaller, "rollout")["KV cache"] - rollout["KV cache"] == saved
    fewer = plan_for(QWEN3_4B, 80, "engine.gpu_memory_utilization=0.5", "engine.max_running=32")
    assert held(fewer, "rollout")["KV cache"] - rollout["KV cache"] == 32 * SAMPLER * shape.vocabulary


@pytest.mark.parametrize(
    "args",
    [
        "[--max-num-batched-tokens, '2048']",
        "[--max-num-batched-tokens=2K]",
        "[--max_num_batched_tokens, 2.048k, --max-num-partial-prefills, '9']",
        "[--max-num-batched-tokens, '9', --max-num-batched-tokens, '2048']",
    ],
)
def test_flags_are_read_as_vllm_reads_them(args):
    plain = plan_for(QWEN3_4B, 80, "engine.args=[--max-num-batched-tokens, '2048']")
    assert plan_for(QWEN3_4B, 80, f"engine.args={args}") == plain != plan_for(QWEN3_4B, 80)


@pytest.mark.parametrize("args", ["[--max-num-batched-tokens, many]", "[--tensor-parallel-size]"])
def test_a_flag_without_a_number_is_named(args):
    with pytest.raises(RecipeError, match=r"engine\.args: --(max-num-batched-tokens|tensor-parallel-size) is"):
        plan_for(QWEN3_4B, 80, f"engine.args={args}")


def test_sequences_of_linear_attention_have_a_state_besides():
    shape, plan = read_shape(QWEN35_9B), plan_for(QWEN35_9B, 80, "trainer.lora={rank: 16}")
    each = 4096 * 32 * 1024 + shape.state_bytes(2)
    assert plan.rollouts == held(plan, "rollout")["KV cache"] // each
    text_only = plan_for(QWEN35_9B, 80, "trainer.lora={rank: 16}", "engine.args=[--language-model-only]")
    assert held(text_only, "rollout")["vLLM weights"] == 2 * (shape.parameters - shape.vision_parameters)


@pytest.mark.parametrize(
    "setting, owner, phase",
    [
        ("trainer.gradient_checkpointing=true", "activations and logits", "training"),
        ("trainer.tokens_per_micro_batch=8192", "activations and logits", "training"),
        ("trainer.offload_optimizer=true", "optimizer", "training"),
        ("engine.enforce_eager=true", "CUDA graphs", "training"),
        ("trainer.n_gpus=2", "weights in training", "training"),
        ("engine.args=[--tensor-parallel-size, '2']", "vLLM weights", "rollout"),
        ("engine.dtype=float32", "vLLM weights", "rollout"),
    ],
)
def test_a_setting_moves_its_owner(setting, owner, phase):
    before, after = plan_for(QWEN3_4B, 80), plan_for(QWEN3_4B, 80, setting)
    more = setting.endswith(("8192", "float32"))
    assert (held(after, phase).get(owner, 0) > held(before, phase)[owner]) == more
    assert (held(after, phase).get(owner, 0) < held(before, phase)[owner]) == (not more)


def test_a_trainer_on_the_cpu_leaves_the_card_alone():
    plan = plan_for(QWEN3_4B, 24, "trainer.device=cpu")
    assert plan.fits and held(plan, "training") == held(plan, "update") == held(plan, "sleeping")
    assert held(plan, "rollout")["CUDA contexts"] == CONTEXT


def test_an_optimizer_in_host_memory_is_on_the_card_while_it_is_applied():
    plan = plan_for(QWEN3_4B, 80, "trainer.offload_optimizer=true")
    assert "optimizer" not in held(plan, "training") and held(plan, "update")["optimizer"] == 8 * plan.parameters


def test_host_memory_holds_the_trainer_while_vllm_has_the_card():
    size = read_shape(QWEN3_4B).parameters
    plan = plan_for(QWEN3_4B, 80, "algorithm.kl=0.05", "engine.transfer=folder")
    assert plan.host["weights in training"] == 4 * size and plan.host["optimizer"] == 8 * size
    assert plan.host["reference"] == plan.host["weights on their way"] == 2 * size
    assert "vLLM asleep" not in plan.host
    adapted = plan_for(QWEN3_4B, 80, "algorithm.kl=0.05", "trainer.lora={rank: 16}")
    assert "reference" not in adapted.host, "it is the model without its adapter"
    assert adapted.host["vLLM asleep"] == 2 * size
    problems = plan_for(QWEN3_4B, 80, "trainer.gradient_checkpointing=true", host_memory=32 * GIB).problems
    assert len(problems) == 1 and problems[0].startswith("host memory: 5") and problems[0].endswith("of 32.0 GiB")


def test_the_embedded_engine_shares_the_card_with_the_trainer():
    plan = plan_for(QWEN25_15B, 40, "engine.kind=embedded", "engine.kv_tokens=65536")
    assert [phase.name for phase in plan.phases] == ["rollout", "training", "update"]
    for phase in plan.phases:
        assert phase.held["engine weights"] == 4 * plan.parameters
        assert phase.held["KV cache"] == 65536 * 2 * 28 * 1024
    assert plan.kv_tokens == 65536 and plan.rollouts == 16
    low = plan_for(QWEN25_15B, 40, "engine.kind=embedded", "engine.kv_tokens=65536", "trainer.dtype=bfloat16")
    assert held(low, "training")["gathered weights"] < held(plan, "training")["gathered weights"]


def test_the_largest_micro_batch():
    shape, hybrid = read_shape(QWEN3_4B), read_shape(QWEN35_9B)
    assert micro_batch(recipe_with("trainer.tokens_per_micro_batch=1024"), shape, 4096) == (4096, 2048)
    assert micro_batch(recipe_with("trainer.tokens_per_micro_batch=8192"), shape, 4096) == (8192, 8192)
    assert micro_batch(recipe_with("trainer.tokens_per_micro_batch=8192"), hybrid, 4096) == (4096, 2048)


def test_what_does_not_fit_is_named():
    plan = plan_for(QWEN3_4B, 24)
    assert not plan.fits and plan.peak.name == "training"
    assert [problem.split()[0] for problem in plan.problems] == ["training", "update"]
    crowded = plan_for(QWEN25_15B, 80, others=20 * GIB)
    assert [problem.split()[0] for problem in crowded.problems] == ["rollout"]
    small = plan_for(QWEN35_9B, 24, "trainer.lora={rank: 16}", "engine.gpu_memory_utilization=0.7")
    assert "the KV cache would hold nothing, and one context has 4096" in small.problems


def test_what_the_model_has_not_is_named():
    long = plan_for(QWEN3_4B, 141, "trainer.lora={rank: 16}", "engine.context_length=50000")
    assert long.problems[0] == "engine.context_length is 50000, and the model was made for 40960 tokens"
    stretched = {**QWEN3_4B, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    settings = ("trainer.lora={rank: 16}", "engine.context_length=50000", "trainer.gradient_checkpointing=true")
    assert not any("made for" in problem for problem in plan_for(stretched, 141, *settings).problems)
    beside = plan_for(QWEN3_4B, 141, "trainer.lora={rank: 16, targets: [query]}")
    assert beside.problems[0].startswith("trainer.lora.targets names no module of the model; it has q_proj, k_proj")
    by_place = plan_for(QWEN3_4B, 141, "trainer.lora={rank: 16, targets: [self_attn.q_proj]}")
    assert by_place.trained == 16 * (2560 + 32 * 128) * 36 and by_place.fits


CASES = [
    (QWEN3_4B, 141, ("engine.context_length=50000", "trainer.lora={rank: 16}", "trainer.gradient_checkpointing=true")),
    (QWEN3_4B, 80, ("trainer.lora={rank: 16, targets: [query]}",)),
    (QWEN25_15B, 24, ()),
    (QWEN3_4B, 80, ("trainer.tokens_per_micro_batch=8192",)),
    (QWEN3_4B, 40, ()),
    (QWEN3_4B, 24, ()),
    (QWEN35_9B, 40, ("trainer.lora={rank: 16}",)),
    (QWEN25_15B, 80, ("engine.gpu_memory_utilization=1.0",)),
]


@pytest.mark.parametrize("config, gib, settings", CASES)
def test_each_advice_fits_and_no_part_of_it_does(config, gib, settings):
    shape, recipe = read_shape(config), recipe_with(*settings)

    def planned(changed):
        return make_plan(changed, shape, gib * GIB)

    assert not planned(recipe).fits
    found = advice(recipe, shape, planned)
    assert 1 <= len(found) <= advising.SHOWN
    for changes in found:
        given = [*SETTINGS, *settings, *(str(change) for change in changes)]
        assert planned(load_recipe(RECIPE, given)).fits, "as --set takes it"
        for part in combinations(changes, len(changes) - 1):
            given = [*SETTINGS, *settings, *(str(change) for change in part)]
            assert not planned(load_recipe(RECIPE, given)).fits
    assert "--set" in advice_lines(found)


def test_where_nothing_helps_it_is_said():
    shape, recipe = read_shape(QWEN35_9B), recipe_with("trainer.lora={rank: 16}")
    found = advice(recipe, shape, lambda changed: make_plan(changed, shape, 8 * GIB))
    assert found == [] and "smaller model" in advice_lines(found)


def test_the_docs_show_the_table_as_it_is():
    recipe = load_recipe(RECIPE.parent / "gsm8k" / "recipe-qwen3-4b.yaml")
    lines = table(make_plan(recipe, read_shape(QWEN3_4B), 80 * GIB), "a GPU of 80 GiB")
    assert "\n".join(lines) in (RECIPE.parents[1] / "docs" / "gpu.md").read_text()


def test_the_table_has_a_column_a_phase_and_adds_up():
    plan = plan_for(QWEN25_15B, 80, "trainer.gradient_checkpointing=true")
    lines = table(plan, "A100 80GB")
    assert lines[0].startswith("memory plan for A100 80GB, 79.2 GiB usable: fits, ")
    head = next(line.split() for line in lines if line.split()[0] == "GiB")
    assert head[1:] == ["rollout", "sleeping", "training", "update", "syncing"]
    totals = next(line.split()[1:] for line in lines if line.split()[0] == "total")
    assert [float(one) for one in totals] == [round(phase.total / GIB, 1) for phase in plan.phases]
    assert any(line.split()[0] == "KV" and f"{plan.kv_tokens:,}" in line for line in lines)
    assert yaml.safe_load(yaml.safe_dump(plan.as_json()))["concurrent_rollouts"] == plan.rollouts
