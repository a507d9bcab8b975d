"""The pages under docs/ are true: the recipe's reference, the links, the keys of the control API, its example."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from mini_run import INTERRUPT, MiniRun

from aglite.config import Recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def reference(name="update_recipe_reference.py"):
    path = ROOT / "docs" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_is_up_to_date():
    page = PAGES["recipe.md"]
    assert reference().updated(page) == page, "run: python docs/update_recipe_reference.py"
    assert "| `group_size` | integer, at least 1 | `8` |" in page


def test_the_columns_of_exports_are_up_to_date():
    page = PAGES["measuring.md"]
    assert reference("update_columns.py").updated(page) == page, "run: python docs/update_columns.py"
    assert "| `loss_mask` | integers | 1 on tokens that carry loss |" in page


def test_the_keys_of_the_terminal_ui_are_up_to_date():
    page = PAGES["terminal-ui.md"]
    assert reference("update_keys.py").updated(page) == page, "run: python docs/update_keys.py"
    assert "| `x` | end the rollout (asks) |" in page


def test_every_setting_says_what_it_means():
    docs = reference()
    for path, model in [("", Recipe), *docs.sections(Recipe)]:
        for name, field in docs.keys(model):
            assert field.description, f"{path}.{name} has no docstring in aglite/config/"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGES[page]):
        assert (ROOT / "docs" / link).exists(), link
    assert f"docs/{page}" in (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = MiniRun(tmp_path_factory.mktemp("docs"), agent={"backend": "external"}, trainer={"steps": 1})
    made.start()
    made.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "rollout")
    yield made
    made.signal(INTERRUPT)
    made.wait()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example uses curl")
def test_the_example_of_an_external_rollout(run):
    page = PAGES["control-api.md"]
    block = re.search(r"<!-- this block is run by .*? -->\n```bash\n(.*?)```", page, re.DOTALL)[1]
    done = subprocess.run(["bash", "-euc", block], cwd=run.folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rollout = run.store().rollouts()[0]
    assert (rollout["state"], rollout["reward"], rollout["breakdown"]) == ("done", 0.7, {"rhyme": 0.7})
    assert rollout["calls"] == 1 and rollout["backend"] == "external"
    assert '{"rollout_id":' in done.stdout and '"chat.completion"' in done.stdout


def test_the_keys_of_the_control_api_are_named(run):
    page = PAGES["control-api.md"]
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    status = run.json("status", "--dir", str(run.run_dir.path))
    keys = set(status) | set(status["engine"]) | set(status["host"]) | set(status["gate"]) | set(status["groups"])
    if rollouts := run.store().rollouts():
        shown = run.aglite("show", rollouts[0]["id"], "--tokens", "--json", "--dir", str(run.run_dir.path))
        detail = json.loads(shown.stdout)
        keys |= set(detail) | {key for call in detail["call_rows"] for key in call}
    assert keys <= named, f"docs/control-api.md does not name {sorted(keys - named)}"
