import re
from pathlib import Path

import pytest
import yaml

from aglite.config import RESUMABLE, Recipe, load_recipe, parse_recipe
from aglite.errors import RecipeError

MINIMAL = {
    "name": "tiny",
    "model": "smollm2-135m",
    "tasks": {"train": "tasks.py:train", "val": "tasks.py:val"},
    "agent": {"command": ["python", "agent.py"]},
    "reward": {"grade": "grade.py:grade"},
}


def recipe(**changes):
    return parse_recipe({**MINIMAL, **changes}, Path("here/recipe.yaml"))


def refused(**changes):
    with pytest.raises(RecipeError) as caught:
        recipe(**changes)
    assert caught.value.exit_code == 2 and caught.value.mend
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(MINIMAL))
    return tmp_path


def test_defaults_and_folder(folder):
    loaded = load_recipe(folder)
    assert loaded.folder == folder and loaded == load_recipe(folder / "recipe.yaml")
    assert loaded.algorithm.name == "grpo" and loaded.normalize == "rollout"
    assert loaded.groups_in_flight == 2 * loaded.algorithm.groups_per_step


def test_an_image_means_docker_and_none_means_local(folder):
    assert load_recipe(folder).agent.backend == "local"
    assert load_recipe(folder, ["agent.image=aglite/python"]).agent.backend == "docker"


def test_the_resolved_recipe_reads_back_the_same(folder):
    loaded = load_recipe(folder, ["algorithm.name=dr_grpo", "agent.env={A: '1'}"])
    (folder / "recipe.yaml").write_text(loaded.to_yaml())
    assert load_recipe(folder) == loaded


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"trainer": {"lr": float("inf")}}, "trainer.lr: Input should be a finite number"),
        ({"agent": {"command": ["x"], "limits": {"wall_s": float("inf")}}}, "agent.limits.wall_s"),
        ({"gateway": {"port": 99999}}, "gateway.port: Input should be less than or equal to 65535"),
        ({"seed": 10**30}, "seed: Input should be less than 4294967296"),
        ({"agent": {"command": ["x"], "backend": "docker"}}, "agent.image: missing"),
        ({"agent": {"command": ["x"], "backend": "local", "image": "i"}}, "agent.image: backend local uses none"),
        ({"agent": {"command": ["x"], "image": "i", "user": "nobody"}}, "agent.user"),
        ({"algoritm": {}}, "algoritm: unknown key (value {}); did you mean algorithm?"),
        (
            {"trainer": {"learning_rate": 1e-5}},
            "trainer.learning_rate: unknown key (value 1e-05); known here: steps, lr",
        ),
        ({"trainer": {"step": 3}}, "trainer.step: unknown key (value 3); did you mean steps?"),
        (
            {"agent": {"command": ["x"], "limits": {"call": 3}}},
            "agent.limits.call: unknown key (value 3); did you mean calls?",
        ),
        (
            {"reward": {"grade": "g.py:g", "timeout": 3}},
            "reward.timeout: unknown key (value 3); did you mean timeout_s?",
        ),
    ],
)
def test_a_typo_is_named_with_what_was_meant(changes, said):
    assert said in refused(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"trainer": {"steps": "many"}}, "trainer.steps: "),
        ({"trainer": {"steps": 0}}, "trainer.steps: "),
        ({"trainer": {"lr": -1}}, "trainer.lr: "),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name: "),
        ({"sampling": {"train": {"temperature": 0}}}, "sampling.train.temperature: "),
        ({"sampling": {"train": {"top_p": 0.9}}}, "sampling.train.top_p: unknown key"),
        ({"name": "a b"}, "name: "),
        ({"agent": {"command": "python agent.py"}}, "agent.command: "),
    ],
)
def test_a_wrong_value_is_named_with_its_path(changes, said):
    message = refused(**changes)
    assert said in message and str(Path("here/recipe.yaml")) in message


def test_missing_parts_are_named():
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"name": "x"}, Path("recipe.yaml"))
    assert all(f"{key}: missing" in str(caught.value) for key in ("model", "tasks", "agent"))


def vllm(*args):
    return {"engine": {"kind": "vllm", "args": list(args)}}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"agent": {}}, "agent.command: missing"),
        ({"reward": None}, "reward: missing"),
        ({"algorithm": {"group_size": 1}}, "algorithm.group_size: 1 leaves grpo without a baseline"),
        ({"algorithm": {"groups_per_step": 4, "groups_in_flight": 3}}, "algorithm.groups_in_flight: 3 is less than"),
        ({"algorithm": {"name": "dr_grpo", "normalize": "sample"}}, "dr_grpo divides by a constant"),
        ({"trainer": {"lr_schedule": "cosine", "warmup_steps": 10}}, "trainer.warmup_steps: 10 of 10 steps leave none"),
        (
            {"trainer": {"device": "cpu", "attention": "flash_attention_2"}},
            "trainer.attention: flash_attention_2 needs",
        ),
        (
            {"trainer": {"dtype": "float32", "attention": "flash_attention_2"}},
            "trainer.attention: flash_attention_2 computes in 16 bits",
        ),
        ({"trainer": {"device": "cpu", "offload_optimizer": True}}, "trainer.offload_optimizer: on the CPU"),
        (
            {"trainer": {"lora": {"targets": ["q_proj", "lm_head"]}}},
            "trainer.lora.targets: lm_head can have no adapter",
        ),
        ({"trainer": {"device": "cpu", "n_gpus": 2}}, "trainer.n_gpus: 2, but device is cpu"),
        ({"trainer": {"nnodes": 3}}, "trainer.nnodes: 3, but the embedded engine shares the weights of one process"),
        ({"engine": {"args": ["--trust-remote-code"]}}, "engine.args: only for engine.kind vllm"),
        (vllm("--gpu-memory-utilization", "0.3"), "has a setting of its own; use `engine.gpu_memory_utilization`"),
        (vllm("--max_model_len=4096"), "--max-model-len has a setting of its own; use `engine.context_length`"),
        (vllm("--no-enforce-eager"), "--enforce-eager has a setting of its own; use `engine.enforce_eager`"),
        (vllm("--language-model-only", "--api-key", "x"), "engine.args: --api-key is aglite's to say"),
        (vllm("--tensor-parallel-size", "0"), "engine.args: --tensor-parallel-size is '0'; give it a number"),
        (vllm("-tp"), "engine.args: -tp is ''"),
        (vllm("--max_num_batched_tokens=many"), "engine.args: --max-num-batched-tokens is 'many'"),
    ],
)
def test_impossible_combinations_are_refused(changes, said):
    assert said in refused(**changes)


def test_all_problems_are_told_at_once():
    message = refused(agent={}, reward=None, algorithm={"group_size": 1})
    assert all(text in message for text in ("agent.command", "reward:", "algorithm.group_size"))


def test_combinations_that_do_work():
    assert recipe(algorithm={"name": "reinforce", "group_size": 1}).algorithm.group_size == 1
    assert recipe(algorithm={"name": "dr_grpo"}).normalize == "rollout_constant"
    assert recipe(algorithm={"mode": "sync", "groups_in_flight": 9}).groups_in_flight == 4
    assert recipe(agent={"backend": "external"}, reward=None).reward is None
    assert recipe(trainer={"lora": {"rank": 4}}).trainer.lora.alpha == 32


def test_set_overrides(folder):
    loaded = load_recipe(folder, ["trainer.lr=5e-5", "trainer.steps=3", "agent.env={TOPIC: tea}", "model=some/other"])
    assert loaded.trainer.lr == 5e-5 and loaded.trainer.steps == 3
    assert loaded.agent.env == {"TOPIC": "tea"} and loaded.model == "some/other"


def test_what_is_quoted_stays_text(folder):
    """Such as the number that an agent finds in its environment."""
    loaded = load_recipe(folder, ['agent.env.TURNS="8"', "agent.env.RATE='5e-5'", "trainer.lr= 5e-5 "])
    assert loaded.agent.env == {"TURNS": "8", "RATE": "5e-5"} and loaded.trainer.lr == 5e-5
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder, ["agent.env.TURNS=8", "agent.env.TRACE=true"])
    assert """agent.env.TURNS: text is wanted, and 8 alone is none; quote it: "8" (--set 'agent""" in str(caught.value)
    assert 'quote it: "true"' in str(caught.value)


@pytest.mark.parametrize(
    "override, said",
    [
        ("trainer.steps", "not of the form key.path=value"),
        ("=3", "not of the form key.path=value"),
        ("trainer..steps=3", "not of the form key.path=value"),
        ("trainer.stepz=3", "did you mean steps?"),
        ("name.first=x", "name is not a section"),
        ("agent.command=[a", "not valid YAML"),
    ],
)
def test_bad_overrides(folder, override, said):
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(folder, [override])


def test_files_that_hold_no_recipe(tmp_path):
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text("name: [")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path)
    file.write_text("- a list")
    with pytest.raises(RecipeError, match="holds no mapping"):
        load_recipe(tmp_path)


def fields(model, prefix=""):
    for name, field in model.model_fields.items():
        inner = field.annotation if isinstance(field.annotation, type) else None
        yield f"{prefix}{name}"
        if inner is not None and hasattr(inner, "model_fields"):
            yield from fields(inner, f"{prefix}{name}.")


def test_what_may_change_on_resume_exists():
    assert set(RESUMABLE) <= set(fields(Recipe))


def test_a_model_folder_beside_the_recipe_is_found(tmp_path):
    (tmp_path / "mine").mkdir()
    file = tmp_path / "recipe.yaml"
    data = {
        "name": "r",
        "model": "mine",
        "tasks": {"train": "t.jsonl", "val": "t.jsonl"},
        "agent": {"command": ["true"]},
        "reward": {"grade": "g.py:g"},
    }
    file.write_text(yaml.safe_dump(data))
    assert load_recipe(file).model == str(tmp_path / "mine")
    assert load_recipe(file, ["model=smollm2-135m"]).model == "smollm2-135m"
