"""The real agent programs of the matrix: where they are, and how a scripted model uses the tools of each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aglite.errors import RecipeError
from aglite.harnesses import HARNESSES
from aglite.harnesses.find import find, version_of

WRITE = "printf forty-two > answer.txt && echo it-is-written"
GRADE = """
    def grade(task, rollout, workdir):
        return 1.0 if (workdir / "answer.txt").read_text() == "forty-two" else 0.0
"""
LIMITS = {"wall_s": 180, "calls": 12, "sampled_tokens": 20_000, "memory_mb": 4096}
"""The task of two turns: a command is run, and said to be done."""


@dataclass(frozen=True)
class Program:
    """How the model under test speaks to one program, in the text of the Hermes format."""

    harness: str
    shell: str
    """The name of the tool that runs a command."""
    argument: str
    more: tuple[tuple[str, str], ...] = ()
    """Further arguments that the shell tool wants."""
    finish: str = "All is done."
    """The reply that ends the task."""
    summarise: str = "(?!)"
    """How it asks for a summary of its history; never, unless said."""

    def run(self, command: str) -> str:
        """A reply that runs a shell command."""
        return call(self.shell, {self.argument: command, **dict(self.more)})


def call(name: str, arguments: dict[str, Any]) -> str:
    # Spaces and keys as a model would write them, not as a program would write them back.
    text = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":  "))
    return f"I use {name}.\n<tool_call>\n{text}\n</tool_call>"


PROGRAMS = {
    program.harness: program
    for program in (
        Program(
            "mini-swe-agent",
            "bash",
            "command",
            finish=call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ),
        Program(
            "openhands",
            "terminal",
            "command",
            (("security_risk", "LOW"),),
            finish=call("finish", {"message": "All is done."}),
            summarise="Now summarize the events using the rules above",
        ),
        Program(
            "opencode",
            "bash",
            "command",
            (("description", "writes the file"),),
            summarise="Do not mention the summary process",
        ),
        Program("codex", "exec_command", "cmd", summarise="helping the next LLM seamlessly continue the work"),
        Program(
            "claude-code",
            "Bash",
            "command",
            (("description", "writes the file"),),
            summarise="an <analysis> block followed by a <summary> block",
        ),
    )
}


def folder_of(harness: str) -> Path | None:
    """The folder of a program's executable: in the folder that AGLITE_HARNESSES names, as tests/harnesses/install.sh
    leaves it, or None for PATH. Skips the test where the program is not installed in the
    version of its preset."""
    root = os.environ.get("AGLITE_HARNESSES")
    folder = None
    if root:
        bins = {"mini-swe-agent": "mini-swe-agent/bin", "openhands": "openhands/bin"}
        folder = Path(root) / bins.get(harness, "node/node_modules/.bin")
    wanted = HARNESSES[harness]
    try:
        version = version_of(wanted, find(wanted, folder))
    except RecipeError as error:
        pytest.skip(f"{error.message} ({error.mend}); tests/harnesses/install.sh installs it for the tests")
    if version != wanted.version:
        pytest.skip(f"{harness} is here in version {version}, the preset is for {wanted.version}")
    return folder
