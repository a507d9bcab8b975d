"""The recipe gsm8k: its sample, its grader (each way around the task scores 0), its agent and calculator, and a run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chat_server import ChatServer
from memory_configs import QWEN3_4B, QWEN25_15B, QWEN35_9B
from mini_run import MiniRun

from aglite.config import load_recipe
from aglite.memory_plan.plan import GIB, make_plan
from aglite.memory_plan.shape import read_shape
from aglite.tasks import load_tasks

ROOT = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = ROOT / "gsm8k"


def module(name):
    spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", RECIPE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


agent, grader, tasks = module("agent"), module("grade"), module("tasks")


# --- tasks


def test_the_sample_has_gsm8ks_form_and_its_sums_are_right():
    problems = tasks.sample()
    assert len(problems) >= 36 and len({one["question"] for one in problems}) == len(problems)
    for problem in problems:
        steps = re.findall(r"<<([^=<>]+)=([^<>]+)>>", problem["answer"])
        assert steps, problem
        for expression, value in steps:
            assert float(agent.calculate(expression)) == float(value), problem
        if not problem["question"].startswith("Three bells"):  # whose sums only confirm the answer
            assert float(tasks.solution(problem["answer"])) in [float(value) for _, value in steps], problem


def test_the_sample_is_split_without_overlap():
    train = load_tasks("tasks.py:sample_train", RECIPE, "train")
    val = load_tasks("tasks.py:sample_val", RECIPE, "val")
    assert (len(train), len(val)) == (24, 12)
    assert not {row["public"]["question"] for row in train} & {row["public"]["question"] for row in val}
    for row in [*train, *val]:
        assert set(row["public"]) == {"question"}, "nothing of the solution is public"
        assert set(row["hidden"]) == {"answer"} and float(row["hidden"]["answer"]) == float(row["hidden"]["answer"])


def test_the_number_is_taken_from_the_last_line():
    assert tasks.solution("6*2=<<6*2=12>>12\n#### 12") == "12"
    assert tasks.solution("It is\n#### 1,350") == "1350"
    assert tasks.solution("#### -7") == "-7"
    assert tasks.solution("x\n#### 40.50") == "40.50"
    for bad in ("no number", "#### ", "#### 12 apples", "#### 12\nand more"):
        with pytest.raises(ValueError, match=r"#### NUMBER"):
            tasks.solution(bad)


def test_gsm8k_is_read_through_datasets(tmp_path, monkeypatch):
    """A stand-in for the hub: which data set is asked for, and what becomes of a row."""
    stand_in = tmp_path / "datasets.py"
    stand_in.write_text(
        "def load_dataset(*name, split):\n"
        "    assert name == ('openai/gsm8k', 'main'), name\n"
        "    return [{'question': f'{split}?', 'answer': 'so\\n#### 1,000'}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    recipe = load_recipe(RECIPE)
    assert load_tasks(recipe.tasks.train, RECIPE, "train") == [
        {"id": "train-00000", "public": {"question": "train?"}, "hidden": {"answer": "1000"}}
    ]
    assert load_tasks(recipe.tasks.val, RECIPE, "val")[0]["public"] == {"question": "test?"}
    stand_in.write_text("def load_dataset(*name, split):\n    raise ConnectionError('no route')\n")
    with pytest.raises(Exception, match=r"tasks\.train=tasks\.py:sample_train"):
        load_tasks(recipe.tasks.train, RECIPE, "train")


# --- grader

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many did she sell?"


def score(answer, tmp_path, right="72"):
    (tmp_path / "answer.txt").write_text(answer)
    graded = grader.grade({"public": {"question": QUESTION}, "hidden": {"answer": right}}, {}, str(tmp_path))
    assert graded["reward"] == pytest.approx(sum(graded["breakdown"].values()))
    return graded["reward"]


@pytest.mark.parametrize(
    "answer, right",
    [
        ("48 / 2 = 24, and 48 + 24 = 72.\nAnswer: 72", "72"),
        ("Answer: 72", "72"),
        ("answer: 72.", "72"),
        ("**Answer: 72**", "72"),
        ("**Answer:** 72", "72"),
        ("Answer: $72", "72"),
        ("Answer: 72.00", "72"),
        ("Answer: 1,350", "1350"),
        ("Answer: $1,234,567.50", "1234567.50"),
        ("Answer: -7", "-7"),
        ("Answer: 45%", "45"),
        ("Answer: 40.5 dollars", "40.50"),
        ("Answer: .5", "0.5"),
    ],
)
def test_the_right_number_in_the_right_form_is_worth_1(answer, right, tmp_path):
    assert score(answer, tmp_path, right) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "answer",
    ["Answer: 71", "Answer: 24", "Answer: 48", "It is 72.\nAnswer: 27", "Answer: 720", "Answer: 7.2", "Answer: -72"],
)
def test_a_wrong_number_in_the_right_form_is_worth_the_form(answer, tmp_path):
    assert score(answer, tmp_path) == pytest.approx(grader.FORM)


@pytest.mark.parametrize(
    "answer",
    [
        # several numbers, one of which is right
        "Answer: 24, 48, 72",
        "Answer: 48 72",
        "Answer: 71 or 72",
        "Answer: 72 (or 24)",
        "Answer: 24\nAnswer: 72",
        "Answer: 72\nAnswer: 72",
        "Answer: 70,71,72",
        "Answer: 7,2",
        "Answer: 48+24",
        "Answer: 48 + 24 = 72",
        "Answer: 72 24 48 71",
        # every number there is
        "\n".join(f"Answer: {number}" for number in range(100)),
        # the problem, or what the tool said
        QUESTION,
        f"{QUESTION} Answer: 72",
        "72",
        '{"expression": "48+24"} -> 72',
        "<tool_response>\n72\n</tool_response>",
        "Answer: <tool_response>72</tool_response>",
        "Answer: calculate(48+24)",
        "<<48+24=72>>72\n#### 72",
        # the form without a number, or not at the end
        "Answer: NUMBER",
        "Answer:",
        "Answer: ",
        "Answer: seventy-two",
        "Answer: 72\nI hope this helps!",
        "The answer is 72.",
        "My answer: 72 apples and no pears",
        "Answer: 1e2",
        "Answer: inf",
        "Answer: nan",
        "Answer: 7 2",
        "",
    ],
)
def test_ways_around_are_worth_nothing(answer, tmp_path):
    assert score(answer, tmp_path) == 0


def test_a_number_of_the_problem_is_worth_the_form_only(tmp_path):
    assert score("Answer: 48", tmp_path) == pytest.approx(grader.FORM)


def test_no_answer_is_worth_nothing(tmp_path):
    graded = grader.grade({"public": {}, "hidden": {"answer": "1"}}, {}, str(tmp_path))
    assert graded["reward"] == 0


# --- calculator


@pytest.mark.parametrize(
    "expression, value",
    [
        ("48/2", "24"),
        ("(12 + 3) * 4 / 5", "12"),
        ("1,200 * 2", "2400"),
        ("2 ^ 10", "1024"),
        ("-4 + 9", "5"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 0.5", "1.414213562"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert agent.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 / 0",
        "x + 1",
        "__import__('os').getcwd()",
        "abs(-1)",
        "'a' * 3",
        "[1] * 10",
        "9 ** 9 ** 9",
        "2 ** 100",
        "10 ** 64",
        "True + 1",
        "(-8) ** 0.5",
        "1e999",
        "1 if 1 else 2",
        "(" * 500 + "1" + ")" * 500,
        "1 +",
        "3 = 3",
    ],
)
def test_the_calculator_refuses(expression):
    assert agent.calculate(expression).startswith("error: ")


# --- agent


def run_agent(model, tmp_path, **environment):
    (tmp_path / "task.json").write_text(json.dumps({"question": QUESTION}))
    done = subprocess.run(
        [sys.executable, str(RECIPE / "agent.py")],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "secret",
            "AGLITE_TASK_FILE": str(tmp_path / "task.json"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return (tmp_path / "answer.txt").read_text()


def call(expression, name="calculate"):
    return {"name": name, "arguments": json.dumps({"expression": expression})}


def test_it_computes_what_it_is_asked_to_and_goes_on_until_the_answer(tmp_path):
    with ChatServer([call("48/2")], [call("48+24"), call("1/0")], "It is so.\nAnswer: 72") as model:
        assert run_agent(model, tmp_path) == "It is so.\nAnswer: 72"
    first, second, third = (request["messages"] for request in model.requests)
    assert [message["role"] for message in first] == ["system", "user"] and first[1]["content"] == QUESTION
    assert second[: len(first)] == first and third[: len(second)] == second, "each call extends the one before"
    assert [message["content"] for message in third if message["role"] == "tool"] == [
        "24",
        "72",
        "error: division by zero",
    ]
    assert all(request["tools"][0]["function"]["name"] == "calculate" for request in model.requests)


def test_calls_that_make_no_sense_are_told_so(tmp_path):
    bad = [{"name": "calculate", "arguments": "48/2"}, call("1", name="search")]
    with ChatServer(bad, "Answer: 1") as model:
        run_agent(model, tmp_path)
    told = [message["content"] for message in model.requests[1]["messages"] if message["role"] == "tool"]
    assert told == [
        'error: the arguments have to be {"expression": "..."}',
        "error: there is no tool 'search', only calculate",
    ]


def test_a_reply_that_was_cut_or_never_came_is_no_answer(tmp_path):
    with ChatServer(("Answer: 72", "length")) as model:
        assert run_agent(model, tmp_path) == ""
    with ChatServer(*[[call("1+1")]] * 3) as model:
        assert run_agent(model, tmp_path, TURNS="3") == ""
    assert len(model.requests) == 3


# --- recipes


GPU_RECIPES = {
    "gsm8k/recipe.yaml": (QWEN25_15B, [80]),
    "gsm8k/recipe-qwen3-4b.yaml": (QWEN3_4B, [80]),
    "gsm8k/recipe-qwen3-4b-lora.yaml": (QWEN3_4B, [80, 40]),
    "gsm8k/recipe-qwen3.5-9b-lora.yaml": (QWEN35_9B, [80]),
    "instruct/recipe-gpu.yaml": (QWEN25_15B, [80, 40]),
}
"""Each with its model and the GiB of the cards that it fits, of 80, 40 and 24."""


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_gpu_recipe_fits_the_cards_that_its_readme_names(name):
    recipe, (config, cards) = load_recipe(ROOT / name), GPU_RECIPES[name]
    plans = {gib: make_plan(recipe, read_shape(config), gib * GIB) for gib in (80, 40, 24)}
    assert [gib for gib, plan in plans.items() if plan.fits] == cards
    assert plans[80].rollouts >= 32


def test_every_gpu_recipe_is_among_them_and_says_that_it_was_not_run():
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*.yaml") if load_recipe(path).engine.own_vllm}
    assert found == set(GPU_RECIPES)
    for name in found:
        readme = (ROOT / name).with_name("README.md").read_text()
        assert Path(name).name in readme and "has not been run on a GPU yet" in readme


# --- a run


@pytest.fixture
def run(tmp_path):
    """The recipe with its sample, a tiny model and a scripted engine that calls the calculator once and answers."""
    tool_call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*14"}}\n</tool_call>'
    replies = [
        {"match": r"<tool_response>\s*84\s*</tool_response>", "text": "That was it.\nAnswer: 84"},
        {"text": tool_call},
    ]
    made = MiniRun(tmp_path / "run", script={"replies": replies, "latency_s": 0.0, "train_s": 0.0})
    recipe = yaml.safe_load((RECIPE / "recipe.yaml").read_text())
    recipe["tasks"] = {"train": "tasks.py:sample_train", "val": "tasks.py:sample_val"}
    recipe["model"] = made.recipe["model"]
    recipe["engine"] = {"kind": "embedded", "context_length": 2048}
    recipe["algorithm"] |= {"group_size": 2, "groups_per_step": 2, "groups_in_flight": 3}
    recipe["trainer"] |= {"steps": 2, "min_free_disk_mb": 0, "checkpoint_every": 2}
    recipe["evaluation"] = {"tasks": 2, "every": 0}
    recipe["agent"]["concurrency"] = 4
    folder = made.folder / "recipe"
    for file in ("agent.py", "grade.py", "tasks.py", "sample.jsonl"):
        (folder / file).write_text((RECIPE / file).read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return made


def test_the_whole_loop_on_the_sample(run):
    code, output = run.up(timeout=280)
    assert code == 0, output
    rollouts = run.store().rollouts(limit=1000)
    trained = [one for one in rollouts if one["split"] == "train" and one["state"] == "done"]
    assert len(trained) >= 8
    for one in trained:
        assert one["calls"] == 2 and one["samples"] == 1, "a call of the tool goes on in the same conversation"
        assert json.loads(one["breakdown"]) if isinstance(one["breakdown"], str) else one["breakdown"]
        assert one["reward"] == pytest.approx(grader.FORM), "84 is the answer to none of the training problems"
