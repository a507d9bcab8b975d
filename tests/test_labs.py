"""The labs: their world, their pages, and each of their scripts in its small form."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aglite.config import load_recipe
from aglite.gateway.renderers import load_renderer
from aglite.tasks import load_tasks

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "docs" / "labs"
NAMES = ("lab1", "lab2", "lab3", "lab4")


@pytest.fixture(scope="module")
def here():
    """The labs' own modules can be imported."""
    sys.path.insert(0, str(LABS))
    yield
    sys.path.remove(str(LABS))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The labs' model after two updates of its warm-up."""
    folder = tmp_path_factory.mktemp("labs") / "model"
    subprocess.run([sys.executable, str(LABS / "warm.py"), str(folder), "2"], check=True, timeout=280)
    return folder


@pytest.mark.parametrize("page", sorted(LABS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (LABS / link).exists(), link


@pytest.mark.parametrize("name", NAMES)
def test_a_labs_recipe_has_tasks_enough_and_asks_for_other_things_in_validation(name):
    recipe = load_recipe(LABS / f"{name}.yaml")
    rows = {split: load_tasks(getattr(recipe.tasks, split), LABS, split) for split in ("train", "val")}
    assert len(rows["val"]) >= recipe.evaluation.tasks
    assert len(rows["train"]) >= recipe.algorithm.groups_per_step
    asked = {split: {asked for row in rows[split] for asked in row["public"]["questions"]} for split in rows}
    assert not asked["train"] & asked["val"]
    assert all(row["public"]["understands"] == row["hidden"]["words"] for split in rows for row in rows[split])


def test_a_person_understands_one_language(here):
    import world

    words = {language: {world.word(thing, language) for thing in world.THINGS} for language in range(4)}
    assert all(not words[a] & words[b] for a in words for b in words if a != b)
    task = next(task for task in world.one_thing("train") if task["public"]["person"] == "baker")
    assert task["hidden"]["words"][0] in words[world.language_of("baker")]


def test_the_model_is_small_speaks_chatml_and_spells_words_in_several_ways(model, here):
    import random

    import warm
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        size = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert 1.5e6 < size < 2.5e6
    renderer = load_renderer(model)
    prompt = renderer.render([{"role": "user", "content": "tree for a sailor"}], [])
    ids, labels = warm.conversation(random.Random(0), warm.make_tokenizer(), 1)
    assert len(prompt) < 16 and labels[: len(prompt)] == [-100] * len(prompt)
    assert ids[-1] == renderer.stop_ids[0] == labels[-1]
    ways = {tuple(warm.spelled(random.Random(seed), "bado")) for seed in range(50)}
    assert ("bado",) in ways and len(ways) > 3 and {"".join(pieces) for pieces in ways} == {"bado"}


def mini(name, model, folder, script, *options):
    """The page and the plot that a lab's small form makes, with a scripted engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").symlink_to(model)
    (folder / "script.json").write_text(json.dumps(script))
    environment = {
        **os.environ,
        "AGLITE_WORKER": "aglite.engine.scripted",
        "AGLITE_SCRIPT": str(folder / "script.json"),
    }
    command = [sys.executable, str(LABS / f"{name}.py"), "--mini", "--runs", str(folder), "--at-once", "4", *options]
    done = subprocess.run(
        [*command, "--set", "trainer.min_free_disk_mb=0"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<svg" in (folder / f"{name}.svg").read_text()[:2000]
    return (folder / f"{name}.md").read_text()


def cells(page, first):
    """The further cells of the table row that begins with `first`."""
    row = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("| ").split("|")[1:]]


def test_lab1_counts_what_tokenising_anew_does(model, tmp_path):
    tokenizer = load_renderer(model).tokenizer
    letters = [tokenizer.token_id(letter) for letter in "ba"]  # the tokenizer itself would make one token of them
    assert len(tokenizer.encode("ba")) == 1
    reply = {"ids": [*letters, tokenizer.token_id("<|im_end|>")], "finish": "stop"}
    page = mini("lab1", model, tmp_path, {"replies": [reply]})
    assert cells(page, "rows per rollout") == ["1.00 ± 0.00", "6.00 ± 0.00"]
    assert cells(page, "tokens of the final text that nobody sampled, in % of its replies") == [
        "0.0 ± 0.0",
        "50.0 ± 0.0",
    ]


def test_lab2_compares_rollouts_with_samples(model, tmp_path, here):
    import world

    asked = {task["public"]["questions"][0]: task["hidden"]["words"][0] for task in world.one_thing("train")}
    replies = [{"match": f"{question}<", "texts": ["ba", word] * 3} for question, word in asked.items()]
    page = mini("lab2", model, tmp_path, {"replies": replies})
    assert "Samples per rollout: 2.00 to 2.00" in page
    assert len(cells(page, "validation at the end")) == 3


def test_lab3_weighs_long_rollouts_by_normalisation(model, tmp_path, here):
    import world

    asked = {task["public"]["questions"][0]: task["hidden"]["words"][0] for task in world.one_thing("train")}
    # the first rollout of a task needs one try, the second finds no right word in six
    replies = [{"match": f"{question}<", "texts": [word]} for question, word in asked.items()]
    page = mini("lab3", model, tmp_path, {"replies": [*replies, {"text": "kaka"}]}, "--set", "agent.concurrency=1")
    weights = {name: float(cells(page, f"`{name}`")[-1]) for name in ("rollout", "token", "sample")}
    assert weights["rollout"] == 1.0 and weights["token"] > 3 and weights["sample"] == 6.0


def test_lab4_measures_steps_the_bound_and_the_gate(model, tmp_path):
    page = mini("lab4", model, tmp_path, {"length": 4})
    assert re.search(r"The bound is \(.*\) / max\(.*\) = \d", page)
    assert float(cells(page, "slow tools: sync and async")[0]) > 0
    assert int(cells(page, "long calls, drain")[0]) == 2
