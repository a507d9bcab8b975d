"""The plan for the card that is here, or for one that is named: in `aglite doctor`, and before a run starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_configs import QWEN3_4B, QWEN25_15B

from aglite import doctor
from aglite.config import load_recipe
from aglite.errors import AgliteError
from aglite.memory_plan.card import Card, present_card, refuse_what_does_not_fit, shape_of
from aglite.memory_plan.plan import GIB
from aglite.model_folder import ModelError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "instruct"


class Nvml:
    """pynvml on a machine with some cards, (name, GiB, GiB in use) each."""

    class NVMLError(Exception):
        pass

    def __init__(self, *cards):
        self.cards = cards

    def nvmlInit(self):
        if not self.cards:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.cards):
            raise self.NVMLError("no such card")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle):
        return self.cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        _, total, used = self.cards[handle]
        return type("Info", (), {"total": total * GIB, "used": used * GIB})


A100 = ("NVIDIA A100-SXM4-80GB", 80, 0)
A10 = ("NVIDIA A10", 24, 1)


@pytest.fixture
def model(tmp_path):
    """A folder with configuration and tokenizer, without weights."""

    def make(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_text("{}")
        return tmp_path

    return make


def recipe_for(folder, *settings):
    given = ["engine.kind=vllm", "engine.context_length=4096", "agent.limits.sampled_tokens=1024", "algorithm.kl=0"]
    return load_recipe(RECIPE, [*given, f"model={folder}", *settings])


@pytest.mark.parametrize(
    "visible, found",
    [
        (None, "NVIDIA A100-SXM4-80GB"),
        ("1", "NVIDIA A10"),
        ("1,0", "NVIDIA A10"),
        ("GPU-1", "NVIDIA A10"),
        ("", None),
        ("7", None),
    ],
)
def test_the_card_is_the_first_that_programs_see(monkeypatch, visible, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    card = present_card(Nvml(A100, A10))
    assert (card and card.name) == found


def test_no_driver_no_card():
    assert present_card(Nvml()) is None
    assert present_card(Nvml(A10)) == Card("NVIDIA A10", 24 * GIB, GIB)


def test_a_run_that_does_not_fit_is_refused_with_the_table_and_the_mend(model):
    folder, said = model(QWEN3_4B), []
    with pytest.raises(AgliteError) as error:
        refuse_what_does_not_fit(recipe_for(folder), folder, said.append, nvml=Nvml(A10))
    lines = error.value.message.splitlines()
    assert "NVIDIA A10" in lines[0] and "does not fit" in lines[0]
    assert any(line.split()[0] == "optimizer" for line in lines)
    assert any(line.split()[:2] == ["other", "programs"] for line in lines), "what is in use already counts"
    assert "--set 'trainer.lora={rank: 16, alpha: 32}'" in error.value.mend
    assert said == []


class Freeing(Nvml):
    """One whose memory comes back while somebody looks at it."""

    reads = 0

    def nvmlDeviceGetMemoryInfo(self, handle):
        self.reads += 1
        info = super().nvmlDeviceGetMemoryInfo(handle)
        info.used = 0 if self.reads > 3 else info.used
        return info


@pytest.mark.parametrize("kind, fits", [(Freeing, True), (Nvml, False)])
def test_memory_of_processes_that_have_just_ended_is_waited_for(model, monkeypatch, kind, fits):
    """As those of the run itself, which is started again after a crash."""
    monkeypatch.setattr("aglite.memory_plan.card.POLL_S", 0.001)
    monkeypatch.setattr("aglite.memory_plan.card.SETTLE_S", 60 if fits else 0.05)
    folder, said = model(QWEN25_15B), []
    recipe = recipe_for(folder, "trainer.gradient_checkpointing=true")
    card = kind(("NVIDIA A100-SXM4-80GB", 80, 70))
    if fits:
        refuse_what_does_not_fit(recipe, folder, said.append, nvml=card)
        assert said[1].startswith("memory plan: 69.2 of 79.2 GiB at most (rollout)")
    else:
        with pytest.raises(AgliteError, match=r"other programs +70\.0 +70\.0"):
            refuse_what_does_not_fit(recipe, folder, said.append, nvml=card)
    assert said[0].startswith("waiting for other programs to free memory of NVIDIA A100") and "70.0 GiB" in said[0]


def test_a_run_that_fits_says_in_a_line_how_well(model):
    folder, said = model(QWEN25_15B), []
    recipe = recipe_for(folder, "trainer.gradient_checkpointing=true")
    refuse_what_does_not_fit(recipe, folder, said.append, nvml=Nvml(A100))
    (line,) = said
    assert line.startswith("memory plan: 69.2 of 79.2 GiB at most (rollout), KV cache of ")


def test_where_nothing_can_be_planned_the_run_goes_on(model):
    folder, said = model({"model_type": "gpt2"}), []
    refuse_what_does_not_fit(recipe_for(folder), folder, said.append, nvml=Nvml(A10))
    assert said == ["no memory plan: the memory that a model of type 'gpt2' takes cannot be planned"]
    refuse_what_does_not_fit(recipe_for(folder), folder, said.append, nvml=Nvml())
    assert len(said) == 1


def test_doctor_plans_for_the_card_that_is_here_or_is_named(model):
    recipe = recipe_for(model(QWEN3_4B))
    here = doctor.gpu_memory(recipe, nvml=Nvml(A10))
    assert here.status == "error" and "does not fit NVIDIA A10" in here.detail and "--set" in here.mend
    named = doctor.gpu_memory(recipe, 141, nvml=Nvml(A10))
    assert named.status == "ok" and named.plan.card == 141 * GIB
    assert doctor.gpu_memory(recipe, nvml=Nvml()).plan is None


def test_what_computes_nothing_on_a_gpu_has_no_plan_for_one(model):
    folder = model(QWEN3_4B)
    attached = doctor.gpu_memory(recipe_for(folder, "engine.url=http://127.0.0.1:1"), 24)
    assert attached.plan is None and attached.detail.endswith("its engine is at http://127.0.0.1:1")
    on_cpu = doctor.gpu_memory(recipe_for(folder, "engine.kind=embedded", "trainer.device=cpu"), 24)
    assert on_cpu.plan is None and on_cpu.detail.endswith("trainer.device is cpu")


def test_a_model_whose_sizes_are_not_known_is_a_warning(model, tmp_path, monkeypatch):
    check = doctor.gpu_memory(recipe_for(model({"model_type": "gpt2"})), 80)
    assert check.status == "warning" and "'gpt2'" in check.detail
    monkeypatch.setenv("AGLITE_CACHE", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="has not been fetched") as error:
        shape_of("smollm2-135m")
    assert error.value.mend == "aglite model fetch smollm2-135m"


def test_the_command_prints_the_table_and_json(model):
    folder = model(QWEN3_4B)
    command = [sys.executable, "-m", "aglite", "doctor", str(RECIPE), "--gpu-gib", "40", "--set", f"model={folder}"]
    command += ["--set", "engine.kind=vllm", "--set", "engine.context_length=4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    assert "✗ gpu memory" in done.stdout and "memory plan for a GPU of 40 GiB" in done.stdout
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280).stdout)
    (plan,) = [check["plan"] for check in found if "plan" in check]
    assert set(plan["phases"]) == {"rollout", "sleeping", "training", "update", "syncing"}
    assert plan["phases"]["training"]["gradients"] == 4 * plan["trained_parameters"]
    bare = subprocess.run([sys.executable, "-m", "aglite", "doctor", "--gpu-gib", "40"], capture_output=True, text=True)
    assert bare.returncode == 2 and "name one" in bare.stderr


@pytest.mark.parametrize("gib", ["0", "-5", "nan", "inf", "1e300"])
def test_a_card_of_no_size_is_refused(gib):
    command = [sys.executable, "-m", "aglite", "doctor", str(RECIPE), f"--gpu-gib={gib}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and "--gpu-gib" in done.stderr and "Traceback" not in done.stderr
