"""The section `reward` of a recipe: who grades, what of the agent's work it sees, what is made of suspicious signs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from aglite.config.sections import Positive, Seconds, Section

WhatNow = Literal["flag", "zero", "fail"]


def _place(path: str) -> str:
    """A path relative to the agent's working directory, in its plain form."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts:
        raise ValueError(f"{path!r} must be a path inside the folder")
    return "/".join(parts)


Place = Annotated[str, AfterValidator(_place)]


class PytestSettings(Section):
    tests: list[Place] = []
    """Files and folders of the recipe folder with the tests. They are put over what the agent left at the same place
    (folders as a whole). A task may bring more, as `hidden.tests`: a mapping of paths to texts."""
    fail_to_pass: list[str] = []
    """Test ids that have to pass, such as `tests/test_a.py::test_b` (with all its parameters). A task's
    `hidden.fail_to_pass` is taken instead where there is one. Without any id, all tests have to pass."""
    pass_to_pass: list[str] = []
    """Test ids that passed before and still have to; likewise `hidden.pass_to_pass`."""
    pythonpath: list[str] = ["."]
    """Folders that tests import from, relative to the working directory."""
    plugins: list[str] = []
    """Plugins of pytest that the tests need; no others are loaded."""
    python: str | None = None
    """The interpreter that has pytest and what the tests import; default: the one that runs aglite, in a container
    `python3`."""


class Judge(Section):
    url: str
    """Address of an OpenAI-compatible endpoint, with or without `/v1` at its end."""
    model: str
    """What the endpoint calls the model."""
    key_env: str = ""
    """Environment variable that holds the endpoint's key. The key stays in aglite's own process."""
    calls: Positive = 16
    """Calls that one grading may make."""


class OnFlag(Section):
    touched_tests: WhatNow = "flag"
    """The agent changed, made or deleted files that the grader's tests own, or that steer pytest or Python."""
    outside_paths: WhatNow = "flag"
    """It changed or made files outside `reward.paths`."""
    symlinks: WhatNow = "flag"
    """It left links that lead out of its folder."""
    special_files: WhatNow = "flag"
    """It left pipes, sockets, devices or what cannot be read, or no working directory."""
    oversize: WhatNow = "flag"
    """It left more than `reward.max_files` or `reward.max_mb`."""
    printed_marker: WhatNow = "flag"
    """It printed something that looks like a grader's result."""
    stragglers: WhatNow = "flag"
    """It left processes behind that were still running when it ended."""
    network: WhatNow = "flag"
    """It tried to reach something beyond its sealed network: an address or a name (`docker` only)."""
    read_git: WhatNow = "flag"
    """The model asked to look into git's history or internals; seen in its replies, where they are kept as text."""
    grader_timeout: WhatNow = "flag"
    """The command or the tests, which run what it made, did not end in time (that grading counts as 0 anyway)."""
    grader_memory: WhatNow = "flag"
    """They needed more memory than their container has (that grading counts as 0 anyway)."""


class Reward(Section):
    grade: str | None = None
    """The grader, as `file.py:function`. Or one of `command` and `pytest`."""
    command: list[str] = []
    """A program that grades. It runs in the recipe folder; where agents have containers, in a fresh one from their
    image, with the files of the recipe folder that it names."""
    files: list[Place] = []
    """Files and folders of the recipe folder that `command` needs in its container besides those it names."""
    sandbox: bool = True
    """`false` runs `command` in the recipe folder on this machine also where agents have containers: for one that runs
    nothing of what the agent made and needs what the image has not."""
    result: Literal["exit_code", "json"] = "exit_code"
    """How `command` says the reward: exit code 0 is 1 and any other 0; or, as the last line of its standard output, a
    number or {"reward": ..., "breakdown": ...}."""
    pytest: PytestSettings | None = None
    """Tests that grade."""
    timeout_s: Seconds = 20
    """Time limit of one grading."""
    repeat: Positive = 1
    """Gradings of one rollout, each in a fresh copy of what the agent left, for graders that are not always right."""
    repeat_rule: Literal["all", "any", "majority", "mean"] = "all"
    """What repeated gradings come to: the lowest reward, the highest, the (lower) median, or the mean; of each part of
    the breakdown likewise."""
    on_failure: Literal["grade", "zero"] = "grade"
    """What a rollout whose agent failed is worth: what the grader finds, or 0 without looking."""
    on_error: Literal["error", "zero"] = "error"
    """What a rollout is worth whose grader raised, hung or gave no number, twice: nothing, it leaves its group; or 0,
    where the agent may have learned to bring the grader down (once the grader has graded another of the run)."""
    paths: list[str] = ["**"]
    """What the grader sees of what the agent left: patterns of paths (`*`, `?`, `**`; a folder means all in it). The
    rest is as the agent was given it."""
    max_files: Positive = 20_000
    """Files and folders that are taken from what the agent left; further ones are left out and flagged."""
    max_mb: Positive = 256
    """Their size in MB, likewise."""
    on_flag: OnFlag = OnFlag()
    judge: Judge | None = None

    @model_validator(mode="after")
    def _one_grader(self) -> Reward:
        given = [name for name in ("grade", "command", "pytest") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"give one of grade, command and pytest, not {' and '.join(given)}"
                if given
                else "no grader; add `grade: grade.py:grade`, or `command` or `pytest`"
            )
        if self.result == "json" and not self.command:
            raise ValueError("result: only for `command`; leave it out")
        if self.files and not self.command:
            raise ValueError("files: only for `command`; leave it out")
        if not self.sandbox and not self.command:
            raise ValueError("sandbox: only for `command`: functions run on this machine, tests in a container")
        if self.judge and self.pytest:
            raise ValueError("judge: tests run beside what the agent made and get no judge; use `grade` or `command`")
        return self
