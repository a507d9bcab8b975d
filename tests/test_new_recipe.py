"""`aglite init` writes a recipe that runs: on a real model with the real trainer, and for every harness it names."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from mini_run import MiniRun

from aglite.config import load_recipe
from aglite.doctor import prompts
from aglite.errors import AgliteError
from aglite.harnesses import HARNESSES
from aglite.new_recipe import CONTEXT, write_recipe
from aglite.store import Store
from aglite.tasks import load_tasks


@pytest.mark.slow
def test_what_it_writes_is_trained(tmp_path: Path) -> None:
    """As a person would: init, one rollout, a short training; the model is tiny and knows nothing."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    here = MiniRun(tmp_path)  # its model, and how its commands are run
    here.worker = {"AGLITE_WORKER": "aglite.worker", "OMP_NUM_THREADS": "1"}
    model = tmp_path / "model"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)

    made = here.aglite("init", "mine", "--model", str(model))
    assert made.returncode == 0, made.stderr
    assert "aglite run mine --task hot" in made.stdout and "aglite up mine" in made.stdout
    tried = here.aglite("run", "mine", "--task", "hot", "--set", "engine.threads=1", timeout=280)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "What is the opposite of hot?" in tried.stdout
    settings = ("trainer.steps=1", "algorithm.group_size=2", "evaluation.tasks=2", "evaluation.rollouts_per_task=1")
    sets = [word for setting in (*settings, "engine.threads=1") for word in ("--set", setting)]
    trained = here.aglite("up", "mine", "--headless", *sets, timeout=280)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    store = Store.open(tmp_path / "runs" / "mine" / "aglite.db", readonly=True)
    (step,) = store.steps()
    assert step["metrics"]["rollouts"] == 8
    assert {row["result"]["n"] for row in store.evaluations()} == {2}


def test_here_by_default_with_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My first recipe!"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = write_recipe(Path())
    assert sorted(names) == ["README.md", "agent.py", "grade.py", "recipe.yaml", "train.jsonl", "val.jsonl"]
    assert load_recipe(folder).name == "My-first-recipe"
    assert (folder / "README.md").read_text().startswith("# My-first-recipe: ")


@pytest.mark.parametrize("name", ["12", "on", "1e3", "null"])
def test_a_name_that_yaml_would_take_for_something_else(tmp_path: Path, name: str) -> None:
    write_recipe(tmp_path / name)
    assert load_recipe(tmp_path / name).name == name


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_recipe_for_a_harness(tmp_path: Path, harness: str) -> None:
    folder = tmp_path / "opposite"
    names = write_recipe(folder, harness=harness)
    assert "agent.py" not in names and "agent.py" not in (folder / "README.md").read_text()
    recipe = load_recipe(folder)
    assert recipe.agent.harness == harness and recipe.engine.context_length == CONTEXT[harness]
    assert prompts(recipe).status == "ok"
    rows = load_tasks(recipe.tasks.train, folder, "train")
    assert rows[0]["public"]["word"] and "{task.word}" in (recipe.agent.prompt or "")
    assert write_recipe(tmp_path / "other", harness=harness, model="mine/model")
    assert load_recipe(tmp_path / "other").model == "mine/model"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("mine")
    with pytest.raises(AgliteError, match=r"has grade\.py already"):
        write_recipe(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["grade.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(AgliteError, match="cannot be written"):
        write_recipe(tmp_path / "new")


def test_the_command(tmp_path: Path) -> None:
    run = MiniRun(tmp_path)
    again = run.aglite("init", "recipe")
    assert again.returncode == 1 and "recipe has README.md already" in again.stderr.replace("agent.py", "README.md")
    unknown = run.aglite("init", "new", "--harness", "minni")
    assert unknown.returncode == 2 and "mini-swe-agent" in unknown.stderr and not (tmp_path / "new").exists()
    made = run.aglite("init", "new", "--harness", "codex")
    assert made.returncode == 0 and "aglite doctor new" in made.stdout and "npm install" in made.stdout
    assert json.loads((tmp_path / "new" / "train.jsonl").read_text().splitlines()[0])["id"]
