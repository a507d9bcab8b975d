"""The kinds of graders: what each needs to be there, and what grade_child.py is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aglite.config import Recipe, Reward
from aglite.errors import RecipeError
from aglite.harnesses.find import search_path
from aglite.rollouts import pytest_child
from aglite.rollouts.backends.local import PASSED_ON

STEERING = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py", "usercustomize.py"}
)
"""Files that tell pytest or Python what to do, wherever they lie."""


class Ungradable(Exception):
    """A task that this grader cannot grade; the text says why."""


class Plan(Protocol):
    """One kind of grader."""

    field: str
    """The recipe's words for it."""
    loads: bool
    """Whether it can be tried without a rollout, by a request without a task."""
    own_environment: bool
    """Whether it runs what the agent made, and so gets nothing of the supervisor's environment."""
    in_container: bool
    """Whether it runs in a container, made from the agent's image."""
    program: str
    """What is started, by the recipe's word for it."""
    steering: frozenset[str]

    def check(self) -> None:
        """Raises RecipeError if something is missing."""
        ...

    def owned(self, task: Mapping[str, Any]) -> list[str]:
        """Places in the agent's working directory that are the grader's. Raises Ungradable."""
        ...

    def request(self, task: Mapping[str, Any], work: Path, tmp: Path, env: Mapping[str, str]) -> dict[str, Any]:
        """What to do with the copy `work`, into which it may put its own files; `tmp` is for whatever else."""
        ...


def plan_of(recipe: Recipe) -> Plan:
    assert recipe.reward is not None
    if recipe.reward.grade:
        return FunctionPlan(recipe.reward.grade, recipe.folder)
    return CommandPlan(recipe) if recipe.reward.command else PytestPlan(recipe)


def clean_environment(tmp: Path) -> dict[str, str]:
    """For programs that run what an agent made: no key of the supervisor's, no PYTHON* variable, an empty home."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**passed, "PATH": search_path(), "HOME": str(tmp), "TMPDIR": str(tmp), "LANG": "C.UTF-8"}


def careful_git(environ: Mapping[str, str]) -> dict[str, str]:
    """What `environ` lacks for git not to take a folder that an agent made for a bare repository: its `config` could
    name programs to run. (A `.git` is not in the copy.)"""
    count = environ.get("GIT_CONFIG_COUNT", "")
    number = int(count) if count.isdigit() else 0
    return {
        "GIT_CONFIG_COUNT": str(number + 1),
        f"GIT_CONFIG_KEY_{number}": "safe.bareRepository",
        f"GIT_CONFIG_VALUE_{number}": "explicit",
    }


class FunctionPlan:
    field = "reward.grade"
    loads = True
    own_environment = False
    in_container = False
    steering: frozenset[str] = frozenset()

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._file, _, self._function = name.partition(":")
        self.program = self._file

    def check(self) -> None:
        if not self._file.endswith(".py") or not self._function.isidentifier():
            raise RecipeError(f"reward.grade: {self._name!r} names no function", "write it as grade.py:grade")

    def owned(self, task: Mapping[str, Any]) -> list[str]:
        return []

    def request(self, task: Mapping[str, Any], work: Path, tmp: Path, env: Mapping[str, str]) -> dict[str, Any]:
        return {
            "kind": "function",
            "folder": str(self._folder),
            "file": self._file,
            "function": self._function,
            "workdir": str(work),
        }


class CommandPlan:
    field = "reward.command"
    loads = False
    own_environment = True
    steering: frozenset[str] = frozenset()

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.reward is not None
        self._reward = recipe.reward
        self._folder = recipe.folder
        self.in_container = recipe.command_is_sealed
        self.program = recipe.reward.command[0]

    def check(self) -> None:
        self._argv()
        for word in self._reward.command[1:]:
            if word.endswith(".py") and not word.startswith("/") and not (self._folder / word).is_file():
                raise RecipeError(f"reward.command: there is no {word!r} in {self._folder}", "correct the name")
        for name in self._reward.files:
            if not (self._folder / name).exists():
                raise RecipeError(f"reward.files: there is no {name!r} in {self._folder}", "correct the name")

    def _files(self) -> list[tuple[Path, str]]:
        """What it needs of the recipe's folder, with the places there."""
        program, *words = self._reward.command
        words += [program] if "/" in program else []
        named = [word for word in words if not word.startswith("/") and ".." not in word.split("/")]
        named = [word for word in named if os.path.isfile(self._folder / word)]
        places = dict.fromkeys(os.path.normpath(name) for name in [*named, *self._reward.files])
        return [(self._folder / place, place) for place in places]

    def _argv(self) -> list[str]:
        program, *arguments = self._reward.command
        if self.in_container:
            if "/" in program and not program.startswith("/") and not os.access(self._folder / program, os.X_OK):
                raise RecipeError(
                    f"reward.command: there is no program {program!r} in {self._folder}",
                    "correct its path, and make it executable; without a slash it is a program of the image",
                )
            return list(self._reward.command)  # other programs are the image's
        if program == "python":
            return [sys.executable, *arguments]
        beside = self._folder / program
        found = (
            str(beside) if "/" in program and os.access(beside, os.X_OK) else shutil.which(program, path=search_path())
        )
        if found is None:
            raise RecipeError(
                f"reward.command: there is no program {program!r}",
                "install it, or write its path in the recipe folder, such as ./grade.sh (and make it executable)",
            )
        return [found, *arguments]

    def owned(self, task: Mapping[str, Any]) -> list[str]:
        return []

    def request(self, task: Mapping[str, Any], work: Path, tmp: Path, env: Mapping[str, str]) -> dict[str, Any]:
        return {
            "kind": "command",
            "folder": str(self._folder),
            "argv": self._argv(),
            "files": [(str(file), place) for file, place in self._files()],
            "env": {**env, "AGLITE_WORKDIR": str(work)},
            "result": self._reward.result,
            "timeout_s": self._reward.timeout_s,
        }


class PytestPlan:
    field = "reward.pytest"
    loads = False
    own_environment = True
    steering = STEERING

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.reward is not None and recipe.reward.pytest is not None
        self._settings = recipe.reward.pytest
        self._timeout_s = recipe.reward.timeout_s
        self._folder = recipe.folder
        self.in_container = recipe.agent.in_container
        self.program = self._settings.python or ("python3" if self.in_container else sys.executable)
        if not self.in_container:
            self.program = os.path.expanduser(self.program)

    def check(self) -> None:
        for place in self._settings.tests:
            if not (self._folder / place).exists():
                raise RecipeError(f"reward.pytest.tests: there is no {place!r} in {self._folder}", "correct the name")
        if self.in_container:
            return  # whether its image has pytest shows when tests are run
        try:
            tried = subprocess.run([self.program, "-I", "-c", "import pytest"], capture_output=True, timeout=60)
            said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        except (OSError, subprocess.TimeoutExpired) as error:
            tried, said = None, str(error)
        if tried is None or tried.returncode:
            raise RecipeError(
                f"reward.pytest: {self.program} has no pytest ({said})",
                "install it there, or name another interpreter with reward.pytest.python",
            )

    def owned(self, task: Mapping[str, Any]) -> list[str]:
        return [*self._settings.tests, *_hidden_tests(task)]

    def _ids(self, task: Mapping[str, Any]) -> dict[str, list[str]]:
        found = {}
        for name in ("fail_to_pass", "pass_to_pass"):
            ids = task["hidden"].get(name, getattr(self._settings, name))
            if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
                raise Ungradable(f"hidden.{name} is {ids!r:.100}, not a list of test ids")
            found[name] = ids
        return found

    def request(self, task: Mapping[str, Any], work: Path, tmp: Path, env: Mapping[str, str]) -> dict[str, Any]:
        hidden, ids = _hidden_tests(task), self._ids(task)
        for place in self._settings.tests:
            _put(self._folder / place, work / place)
        for place, text in hidden.items():
            target = work / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        ini = tmp / "pytest.ini"
        ini.write_text("[pytest]\n")
        files = sorted({one.partition("::")[0] for name in ids for one in ids[name]})
        if not files:
            files = [place for place in [*self._settings.tests, *hidden] if _has_tests(work / place)]
        plan = {
            "root": str(work.resolve()),
            "ini": str(ini),
            "files": [file for file in files if (work / file).exists()],
            **ids,
            "pythonpath": self._settings.pythonpath,
            "plugins": self._settings.plugins,
        }
        return {
            "kind": "pytest",
            "argv": [self.program, "-I", "-B", pytest_child.__file__],
            "env": {**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            "plan": plan,
            "timeout_s": self._timeout_s,
        }


def _hidden_tests(task: Mapping[str, Any]) -> dict[str, str]:
    """A task's own test files: texts by their places. Raises Ungradable."""
    tests = task["hidden"].get("tests", {})
    if not isinstance(tests, dict) or not all(isinstance(text, str) for text in tests.values()):
        raise Ungradable(f"hidden.tests is {tests!r:.100}, not a mapping of paths to texts")
    for place, text in tests.items():
        if place.startswith("/") or ".." in place.split("/") or place != os.path.normpath(place):
            raise Ungradable(f"hidden.tests: {place!r} is no path inside the working directory")
        try:
            (place + text).encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON may hold
            raise Ungradable(f"hidden.tests: {place!r}: {error.object[error.start]!r} is no character") from None
    return tests


def _has_tests(place: Path) -> bool:
    return place.is_dir() or place.name.startswith("test_") or place.name.endswith("_test.py")


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def names_of(reward: Reward) -> Sequence[tuple[str, str]]:
    """(setting, file of the recipe) that a grader is made of: no agent may be given one. Tests may be shown."""
    if reward.grade:
        return [("reward.grade", reward.grade.partition(":")[0])]
    return [*(("reward.command", word) for word in reward.command), *(("reward.files", name) for name in reward.files)]
