"""`aglite init`: a recipe to begin with, a copy of `starter/` or a variant of it that names a harness."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from aglite.errors import AgliteError
from aglite.harnesses import HARNESSES

STARTER = Path(__file__).parent / "starter"
NAME, MODEL = "opposites", "smollm2-135m"

HARNESS_MODEL = "Qwen/Qwen3-0.6B"
"""The smallest model whose context holds what the larger agent programs send before they have begun."""
CONTEXT = {"mini-swe-agent": 8192, "openhands": 20480, "opencode": 20480, "codex": 20480, "claude-code": 32768}
"""Tokens that a program's instructions and tools take, and about as much again to work in."""

COMMAND = "agent: {command: [python, agent.py], limits: {calls: 1, wall_s: 60}}\n"
HARNESS = """\
agent:
  harness: {harness}
  prompt: "Write the opposite of the word '{{task.word}}', that one word only, into the file answer.txt in this folder."
  limits: {{calls: 10, wall_s: 900, sampled_tokens: 4096, memory_mb: 4096}}
  concurrency: 4
engine: {{context_length: {context}}}
"""
AGENT_LINE = re.compile(r"- `agent\.py`.*\n")


def write_recipe(folder: Path, *, harness: str | None = None, model: str | None = None) -> list[str]:
    """Write the files of a recipe that runs into `folder`, which is made if need be; returns their names.

    Its `name` is the folder's. Raises AgliteError, before anything is written, where one of the files is there already.
    """
    files = _files(folder, harness, model)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise AgliteError(f"{folder} has {there[0]} already", "name another folder: aglite init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AgliteError(f"{folder} cannot be written: {error.strerror}", "name another folder") from None
    return list(files)


def _files(folder: Path, harness: str | None, model: str | None) -> dict[str, str]:
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(STARTER.iterdir()) if file.is_file()}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._") or "recipe"
    texts["README.md"] = texts["README.md"].replace(f"# {NAME}:", f"# {name}:", 1)
    plain = yaml.safe_load(name) == name  # unlike 12 or off
    recipe = _replaced(texts["recipe.yaml"], f"name: {NAME}\n", f"name: {name if plain else repr(name)}\n")
    if harness is not None:
        del texts["agent.py"]
        recipe = _replaced(recipe, COMMAND, HARNESS.format(harness=harness, context=CONTEXT[harness]))
        line = f"- the agent: {harness}, configured by aglite. `prompt` is what it is told, and its folder is graded.\n"
        texts["README.md"] = AGENT_LINE.sub(line, texts["README.md"]).replace(
            "put your agent in the place of `agent.py`", "write a prompt of your own"
        )
        model = model or (MODEL if CONTEXT[harness] <= CONTEXT["mini-swe-agent"] else HARNESS_MODEL)
    texts["recipe.yaml"] = _replaced(recipe, f"model: {MODEL}\n", f"model: {model or MODEL}\n")
    return texts


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text, f"starter/recipe.yaml has no line {old!r}"
    return text.replace(old, new, 1)


def next_steps(folder: Path, harness: str | None) -> list[str]:
    """What to do with it."""
    where = "." if folder == Path() else str(folder)
    lines = [
        f"one rollout, told in full   aglite run {where} --task hot",
        f"train                       aglite up {where}",
    ]
    if harness is not None:
        lines.insert(
            0, f"is {harness} here?".ljust(28) + f"aglite doctor {where}   (else: {HARNESSES[harness].install})"
        )
    return lines
