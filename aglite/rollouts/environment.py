"""What an agent gets: its environment variables and its files. Nothing here depends on where it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.rollouts.backends import Launch

OWN_NAMES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_MODEL",
    "AGLITE_ROLLOUT_ID",
    "AGLITE_TASK_FILE",
    "AGLITE_SUPERVISOR",
)
"""Variables that aglite sets; a recipe may not."""

LONGEST_VALUE = 128 * 1024 - 1024
"""The kernel refuses an environment entry of 128 KiB."""

PLACEHOLDER = re.compile(r"\{task\.([A-Za-z0-9_][A-Za-z0-9_.-]*)\}")


def make_launch(
    recipe: Recipe,
    task: Mapping[str, Any],
    *,
    rollout_id: str,
    attempt: int,
    url: str,
    token: str,
    model: str,
    log: Path,
) -> Launch:
    """One attempt as a backend is asked to run it. `url` is the rollout's own prefix, without `/v1`.

    `task` is the whole row; only its public part is used. Raises RecipeError naming what the agent section gets wrong.
    """
    return Launch(
        rollout_id=rollout_id,
        attempt=attempt,
        command=recipe.agent.command,
        files=agent_files(recipe),
        task=task["public"],
        env=_environment(recipe, task, url=url, token=token, model=model, rollout_id=rollout_id),
        limits=recipe.agent.limits,
        log=log,
    )


def _environment(
    recipe: Recipe, task: Mapping[str, Any], *, url: str, token: str, model: str, rollout_id: str
) -> dict[str, str]:
    values = {name: fill(text, task, f"agent.env.{name}") for name, text in recipe.agent.env.items()}
    return {
        **values,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": token,
        "ANTHROPIC_MODEL": model,
        "AGLITE_ROLLOUT_ID": rollout_id,
    }


def fill(text: str, task: Mapping[str, Any], where: str) -> str:
    """Replace each `{task.field}` (or `{task.field.inner}`) by the value in the task's public part.

    Texts go in as they are, everything else as JSON. Other braces are left alone.
    """

    def value(match: re.Match[str]) -> str:
        here: Any = task["public"]
        done = "public"
        for key in match[1].split("."):
            if not isinstance(here, Mapping) or key not in here:
                known = ", ".join(map(str, here)) if isinstance(here, Mapping) else "no fields"
                raise RecipeError(
                    f"{where}: task {task['id']!r} has no {key!r} in its {done} part",
                    f"it has: {known or 'nothing'}",
                )
            here, done = here[key], f"{done}.{key}"
        return here if isinstance(here, str) else json.dumps(here, ensure_ascii=False)

    filled = PLACEHOLDER.sub(value, text)
    problem = ""
    try:
        size = len(filled.encode())
    except UnicodeEncodeError as error:
        problem = f"{filled[error.start]!r} is no character of UTF-8"
    else:
        if size > LONGEST_VALUE:
            problem = f"{size:,} bytes are more than a process can be given"
        elif "\0" in filled:
            problem = "it has a NUL character"
    if problem:
        raise RecipeError(f"{where} with task {task['id']!r}: {problem}", "read AGLITE_TASK_FILE in the agent instead")
    return filled


def agent_files(recipe: Recipe) -> list[tuple[Path, str]]:
    """The files an agent gets, as (source, place in its working directory): those of the recipe folder that
    `agent.command` names, and `agent.files`. Raises RecipeError for one that is missing or must stay out of its sight.
    """
    agent, folder = recipe.agent, recipe.folder
    files = {}
    for position, word in enumerate(agent.command):
        file = _inside(folder, word)
        if file is not None and file.is_file():
            files[file.relative_to(folder).as_posix()] = file
        elif position > 0 and word.endswith(".py") and not Path(word).is_absolute():
            raise RecipeError(f"agent.command: there is no {word!r} in {folder}", "correct the name")
    for name in agent.files:
        file = _inside(folder, name)
        if file is None:
            raise RecipeError(f"agent.files: {name!r} is not inside {folder}", "copy it into the recipe folder")
        if not file.exists():
            raise RecipeError(f"agent.files: there is no {name!r} in {folder}", "correct the name")
        files[file.relative_to(folder).as_posix()] = file
    for field, hidden in _hidden_files(recipe):
        for place, file in files.items():
            if hidden == file or file in hidden.parents:
                raise RecipeError(
                    f"agent.files: {place!r} would show the agent {hidden.name!r}, which {field} names",
                    "list the agent's own files one by one, or put them in a folder of their own",
                )
    return [(file, place) for place, file in files.items()]


def check_agent(recipe: Recipe) -> None:
    """Refuse an agent section that cannot work, before anything is launched. Raises RecipeError."""
    agent = recipe.agent
    for name in agent.env:
        if name in OWN_NAMES:
            raise RecipeError(f"agent.env.{name}: aglite sets this variable itself", "leave it out")
        if not name or "=" in name or "\0" in name:
            raise RecipeError(f"agent.env: {name!r} cannot be the name of a variable", "rename it")
    agent_files(recipe)


def _inside(folder: Path, name: str) -> Path | None:
    """`name` in `folder`, or None if it leads out of it (also through a symbolic link)."""
    if not name or len(name) > 4096 or "\0" in name:
        return None
    file = folder / name
    try:
        return Path(*file.parts) if file.resolve().is_relative_to(folder.resolve()) and ".." not in file.parts else None
    except OSError:
        return None


def _hidden_files(recipe: Recipe) -> list[tuple[str, Path]]:
    sources = [("tasks.train", recipe.tasks.train), ("tasks.val", recipe.tasks.val)]
    if recipe.reward:
        sources.append(("reward.grade", recipe.reward.grade))
    return [(field, recipe.folder / source.partition(":")[0]) for field, source in sources]
