"""The recipes that come with aglite are found in a clone and in an installed package, and `aglite up` offers them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aglite import shipped
from aglite.cli import start
from aglite.config import load_recipe
from aglite.errors import RecipeError

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/recipe.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git has, without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("aglite", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q", "-w", out, source]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "setuptools" in done.stderr and "No module named" in done.stderr:
        pytest.skip("building needs setuptools")
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_an_installed_aglite_finds_the_recipes(wheel: Path, tmp_path: Path) -> None:
    installed, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def aglite(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aglite", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment, timeout=240)

    listed = aglite("up")
    assert listed.returncode == 2, listed.stdout + listed.stderr
    assert all(f"aglite up {name} " in listed.stderr for name in SHIPPED)
    code = "import aglite.shipped, aglite.config; print(aglite.config.load_recipe('instruct').folder)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here, env=environment, check=True
    )
    assert found.stdout.strip() == str(installed / "aglite" / "recipes" / "instruct")
    made = aglite("init", "mine")
    assert made.returncode == 0 and (here / "mine" / "grade.py").is_file(), made.stderr
    for name in SHIPPED:
        there = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes" / name).glob("*") if path.is_file()}
        assert all((installed / "aglite" / "recipes" / path).is_file() for path in there)


def test_a_recipe_is_found_by_its_name_where_no_file_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("instruct", "recipes/instruct"):
        assert load_recipe(name).folder == ROOT / "recipes" / "instruct"
    for name in ("gsm8k/recipe-qwen3-4b.yaml", "recipes/gsm8k/recipe-qwen3-4b.yaml"):
        assert load_recipe(name).name == "gsm8k-qwen3-4b"
    for name in ("elsewhere/instruct", "/instruct", "instruc", "gsm8k/recipe.yml", "gsm8k/grade.py", "gsm8k/../gsm8k"):
        with pytest.raises(RecipeError, match="no recipe at"):
            load_recipe(name)
    shutil.copytree(ROOT / "aglite" / "starter", tmp_path / "instruct")
    assert load_recipe("instruct").name == "opposites"


def test_recipes_here_come_first_and_each_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "aglite" / "starter", tmp_path / "recipes" / "mine")
    monkeypatch.chdir(tmp_path)
    offered = dict(shipped.offered())
    assert next(iter(offered)) == "recipes/mine" and set(SHIPPED) < set(offered)
    assert offered["recipes/mine"] == "opposites: answer with one word"
    assert offered["instruct"] == "follow a small instruction"
    monkeypatch.chdir(ROOT)
    assert [name for name, _ in shipped.offered()] == [f"recipes/{name}" for name in SHIPPED]


def test_on_a_terminal_a_number_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "in_terminal", lambda: True)
    number = 1 + [name for name, _ in shipped.offered()].index("instruct")
    answers = iter(["0", "many", str(number)])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert start.chosen_recipe() == Path("instruct")
    assert f"  {number}  instruct" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert str(start.chosen_recipe()) == shipped.offered()[0][0]

    def end_of_input(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    with pytest.raises(RecipeError, match="no recipe was chosen"):
        start.chosen_recipe()


def test_the_folder_we_are_in_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "aglite" / "starter", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert start.chosen_recipe() == Path()
