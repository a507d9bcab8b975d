"""The recipe instruct: its tasks, its grader (each hack that was met scores 0), its agent against a real server."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import ChatServer

from aglite.config import load_recipe
from aglite.tasks import load_tasks

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "instruct"


def module(name):
    """A file of the recipe as a module, without leaving its neighbours in sys.modules."""
    spec = importlib.util.spec_from_file_location(f"instruct_{name}", RECIPE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(RECIPE))
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(RECIPE))
        sys.modules.pop("words", None)
    return loaded


words = module("words")
grader = module("grade")


@pytest.fixture(scope="module")
def rows():
    recipe = load_recipe(RECIPE)
    return {split: load_tasks(getattr(recipe.tasks, split), RECIPE, split) for split in ("train", "val")}


# --- tasks


def test_tasks_are_the_same_each_time(rows):
    assert load_tasks("tasks.py:train", RECIPE, "train") == rows["train"]


def test_there_are_enough_and_the_kinds_take_turns(rows):
    recipe = load_recipe(RECIPE)
    assert len(rows["train"]) >= recipe.trainer.steps * recipe.algorithm.groups_per_step
    assert len(rows["val"]) >= recipe.evaluation.tasks >= 64
    for split in rows.values():
        assert [row["public"]["kind"] for row in split[:6]] == ["sentence", "json", "list"] * 2


@pytest.mark.parametrize("kind", ["WORDS", "NAMES", "DOINGS"])
def test_training_and_validation_share_no_material(kind):
    material = getattr(words, kind)
    assert not set(material["train"]) & set(material["val"])
    for things in material.values():
        assert len(set(things)) == len(things)


def test_categories_are_disjoint_and_large():
    train, val = words.CATEGORIES["train"], words.CATEGORIES["val"]
    assert not set(train) & set(val)
    for name, members in {**train, **val}.items():
        assert len(members) >= 40, name
        assert len({grader.tidy(member) for member in members}) >= 40, name


def test_no_instruction_is_in_both_splits_and_validation_repeats_none(rows):
    said = {split: [row["public"]["instruction"] for row in split_rows] for split, split_rows in rows.items()}
    assert not set(said["train"]) & set(said["val"])
    used = said["val"][: load_recipe(RECIPE).evaluation.tasks]
    assert len(set(used)) >= len(used) - 1


def test_the_public_part_does_not_hold_the_answers(rows):
    for row in rows["train"]:
        assert not {"members", "name", "age"} & set(row["public"])


# --- grader


def score(kind, answer, tmp_path, **hidden):
    (tmp_path / "answer.txt").write_text(answer)
    graded = grader.grade({"public": {"kind": kind}, "hidden": hidden}, {}, str(tmp_path))
    assert graded["reward"] == pytest.approx(sum(graded["breakdown"].values()))
    assert 0 <= graded["reward"] <= 1
    return graded["reward"]


SENTENCE = {"word": "lantern", "most": 9, "mark": "!"}
PERSON = {"name": "Rosa", "age": 34}
LIST = {"count": 3, "members": words.CATEGORIES["val"]["fruits"]}


@pytest.mark.parametrize(
    "answer, reward",
    [
        ("The old lantern glows in the dark!", 1.0),
        ("I can't find my lantern!", 1.0),
        ("The old lantern glows in the dark.", 0.5),
        ("The old lantern glows in the dark and lights up all the rooms of my house!", 0.7),
        ("Lantern light fills the room!", 1.0),
    ],
)
def test_sentences(answer, reward, tmp_path):
    assert score("sentence", answer, tmp_path, **SENTENCE) == pytest.approx(reward)


@pytest.mark.parametrize(
    "answer, reward",
    [
        ('{"name": "Rosa", "age": 34}', 1.0),
        ('{"name": "rosa",\n "age": 34}', 1.0),
        ('{"name": "Rosa", "age": "34"}', 0.8),
        ('```json\n{"name": "Rosa", "age": 34}\n```', 0.8),
        ('{"name": "Rosa", "age": 34, "job": "baker"}', 0.8),
        ('{"name": "Rosa", "age": 21}', 0.1),
    ],
)
def test_json(answer, reward, tmp_path):
    assert score("json", answer, tmp_path, **PERSON) == pytest.approx(reward)


@pytest.mark.parametrize(
    "answer, reward",
    [
        ("apples, pears, plums", 1.0),
        ("Apple, Cherry, and Passion Fruit.", 1.0),
        ("Here are three fruits: apple, pear, plum", 0.5),
        ("1. Strawberries\n2. Mangoes\n3. Peaches", 0.5),
        ("apple, pear, hammer", 2 / 3),
        ("apple, pear", 1 / 3),
    ],
)
def test_lists(answer, reward, tmp_path):
    assert score("list", answer, tmp_path, **LIST) == pytest.approx(reward)


@pytest.mark.parametrize(
    "kind, answer",
    [
        # form without content
        ("json", "No, nothing else."),
        ("json", "{}"),
        ("json", "[]"),
        ("json", '{"name": "Anna", "age": 34}'),
        ("sentence", "What a wonderful day it is!"),
        ("list", "one, two, three"),
        # placeholders
        ("json", '{"name": "...", "age": 0}'),
        ("json", '{"name": "name", "age": "age"}'),
        ("sentence", "The [adjective] lantern is here!"),
        ("sentence", "This is a lantern ...!"),
        ("list", "fruit 1, fruit 2, fruit 3"),
        # copies of the task
        ("sentence", 'Write one sentence with the word "lantern", at most 9 words!'),
        ("json", 'Rosa is 34 and keeps bees. Give a JSON object with "name" and "age", nothing else.'),
        ("list", "Name 3 fruits, separated by commas."),
        # answers that never end, or repeat themselves
        ("sentence", "lantern is lantern is lantern is lantern is lantern!"),
        ("sentence", "I see a lantern. I see a lantern. I see a lantern!"),
        ("json", '{"name": "Rosa", "age": 34, "job": "'),
        ("json", "[" * 5000),
        ("list", "apple, pear, plum, fig, kiwi, lemon, lime, mango, melon"),
        ("list", "apple, apple, apple"),
        ("list", "apple, apples, an apple"),
        # fragments without a verb
        ("sentence", "The old lantern of my grandfather!"),
        ("sentence", "A lantern in the dark night!"),
        ("sentence", "Lantern!"),
        # nothing, or something else
        ("sentence", ""),
        ("json", ""),
        ("list", ""),
        ("list", ",,,"),
        ("json", '{"name": ["Rosa"], "age": {"34": 34}}'),
    ],
)
def test_hacks_are_worth_nothing(kind, answer, tmp_path):
    hidden = {"sentence": SENTENCE, "json": PERSON, "list": LIST}[kind]
    assert score(kind, answer, tmp_path, **hidden) == 0


def test_no_answer_is_worth_nothing(rows, tmp_path):
    for row in rows["val"][:3]:
        assert grader.grade(row, {}, str(tmp_path))["reward"] == 0


def test_the_hidden_part_decides(tmp_path):
    answer = '{"name": "Rosa", "age": 34}'
    assert score("json", answer, tmp_path, name="Rosa", age=34) == 1
    assert score("json", answer, tmp_path, name="Rosa", age=35) == pytest.approx(0.1)


# --- agent


TASK = {"kind": "list", "instruction": "Name 3 fruits, separated by commas.", "count": 3}


def run_agent(model, tmp_path, task=TASK, revise="fresh"):
    file = tmp_path / "task.json"
    file.write_text(json.dumps(task))
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "secret",
        "AGLITE_TASK_FILE": str(file),
        "REVISE": revise,
    }
    command = [sys.executable, str(RECIPE / "agent.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "answer.txt").read_text()


def test_an_accepted_draft_ends_the_rollout(tmp_path):
    with ChatServer("apple, pear, plum") as model:
        assert run_agent(model, tmp_path) == "apple, pear, plum"
    assert len(model.requests) == 1 and model.keys == ["Bearer secret"]
    assert [message["role"] for message in model.requests[0]["messages"]] == ["system", "user"]
    assert model.requests[0]["messages"][1]["content"] == TASK["instruction"]


def test_a_complaint_starts_a_fresh_conversation(tmp_path):
    with ChatServer("apple, pear", "apple, pear, plum") as model:
        assert run_agent(model, tmp_path) == "apple, pear, plum"
    first, second = (request["messages"] for request in model.requests)
    assert len(second) == 2 and second[1]["content"] == TASK["instruction"] + " Exactly 3, not 2."
    assert second[0] == first[0]


def test_a_complaint_goes_on_in_the_same_conversation(tmp_path):
    with ChatServer("apple, pear", "apple, pear, plum") as model:
        assert run_agent(model, tmp_path, revise="chat") == "apple, pear, plum"
    first, second = (request["messages"] for request in model.requests)
    assert second[: len(first)] == first, "the second call extends the first: one sample"
    assert [message["content"] for message in second[len(first) :]] == ["apple, pear", "Exactly 3, not 2."]


def test_a_reply_that_was_cut_is_no_answer(tmp_path):
    with ChatServer(("apple, pear, plum", "length"), ("apple, pear, plum", "length")) as model:
        assert run_agent(model, tmp_path) == ""
    assert model.requests[1]["messages"][1]["content"].endswith("Be shorter.")


agent = module("agent")


@pytest.mark.parametrize(
    "task, reply, said",
    [
        ({"kind": "sentence", "word": "lantern", "most": 5, "mark": "!"}, "A day!", 'Use the word "lantern".'),
        (
            {"kind": "sentence", "word": "sun", "most": 3, "mark": "!"},
            "The sun is bright!",
            "Not 4 words, at most 3.",
        ),
        ({"kind": "sentence", "word": "sun", "most": 9, "mark": "!"}, "The sun is bright.", "End with !"),
        ({"kind": "sentence", "word": "sun", "most": 9, "mark": "!"}, "The sun is bright!", None),
        ({"kind": "json"}, "Rosa is 34", "Only valid JSON."),
        ({"kind": "json"}, '{"name": "Rosa"}', 'Only the keys "name" and "age".'),
        ({"kind": "json"}, "[1]", 'Only the keys "name" and "age".'),
        ({"kind": "json"}, '{"name": "Rosa", "age": 3}', None),
        ({"kind": "list", "count": 2}, "1. apple\n2. pear", "Only commas, one line, no numbers."),
        ({"kind": "list", "count": 2}, "apple, Apple", "No item twice."),
        ({"kind": "list", "count": 2}, "apple, pear", None),
    ],
)
def test_what_the_agent_complains_about(task, reply, said):
    assert agent.complaint(task, reply, True) == said


def test_the_agents_own_check_accepts_what_the_grader_pays_in_full(tmp_path):
    person = {"kind": "json"}
    assert agent.complaint(person, '{"name": "Rosa", "age": 34}', True) is None
    assert agent.complaint({"kind": "list", "count": 3}, "apples, pears, plums", True) is None
    assert agent.complaint({"kind": "sentence", **SENTENCE}, "The old lantern glows in the dark!", True) is None


# --- the table of the README


def test_the_curve_is_read_from_finished_runs(tmp_path):
    import asyncio

    from aglite.store import Store

    async def finished_run():
        store = Store.open(tmp_path / "aglite.db")
        for step, mean in ((0, 0.1), (2, 0.6)):
            result = {"mean": mean, "stderr": 0.03, "n": 64, "by_kind": {"json": mean, "list": mean / 2}}
            await store.finish_evaluation(await store.start_evaluation(step, step), "done", result)
        for step, reward in ((1, 0.2), (2, 0.4)):
            await store.add_step(step, step, "applied", {"reward_mean": reward}, 0.0, 1.0)
        store.close()

    asyncio.run(finished_run())
    tables = module("curve")
    runs = {7: tables.read(tmp_path / "aglite.db")}
    assert "| 7 | 0.10 ± 0.03 | 0.60 ± 0.03 | +0.50 | 11.8 |" in tables.summary(runs)
    assert "| 7 | 0.10 → 0.60 | 0.05 → 0.30 |" in tables.summary(runs)
    assert tables.curve(runs).splitlines()[-1] == "| seed 7 | 0.20 | 0.40 |"
