"""What the README shows is true: its quotations, its table of commands, its links and its example recipe."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import ChatServer

from aglite.config import load_recipe
from aglite.tasks import load_tasks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "aglite" / "starter"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quotations_and_commands_are_up_to_date():
    assert load(ROOT / "docs" / "update_readme.py").updated(README) == README, "run: python docs/update_readme.py"
    assert "| `aglite up` |" in README and "def grade(task, rollout, workdir)" in README


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(EXAMPLE)


def test_the_example_recipe_loads_with_its_tasks(recipe):
    splits = {split: load_tasks(getattr(recipe.tasks, split), EXAMPLE, split) for split in ("train", "val")}
    ids = [row["id"] for rows in splits.values() for row in rows]
    assert len(set(ids)) == len(ids) and len(splits["train"]) >= recipe.algorithm.groups_per_step
    assert len(splits["val"]) >= recipe.evaluation.tasks


@pytest.mark.parametrize(
    "reply, reward", [("Cold.", 1.0), ("cold", 1.0), ("The opposite is cold", 0.25), ("hot", 0.0), ("", 0.0)]
)
def test_the_example_agent_and_grader(reply, reward, tmp_path):
    task = {"id": "hot", "public": {"word": "hot"}, "hidden": {"opposites": ["cold"]}}
    (tmp_path / "task.json").write_text(json.dumps(task["public"]))
    with ChatServer(reply) as server:
        environment = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "secret",
            "AGLITE_TASK_FILE": str(tmp_path / "task.json"),
        }
        subprocess.run([sys.executable, EXAMPLE / "agent.py"], cwd=tmp_path, env=environment, check=True, timeout=240)
    assert "opposite of hot" in server.requests[0]["messages"][-1]["content"]
    assert load(EXAMPLE / "grade.py").grade(task, {}, tmp_path) == reward
