"""What an agent gets: its environment variables and its files. Nothing here depends on where it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aglite.config import Limits, Recipe
from aglite.errors import RecipeError
from aglite.harnesses import HARNESSES, Kit, Order
from aglite.harnesses.find import find
from aglite.paths import ROLLOUT_ID
from aglite.rollouts.backends import Launch
from aglite.rollouts.plans import names_of

OWN_NAMES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_MODEL",
    ROLLOUT_ID,
    "AGLITE_TASK_FILE",
    "AGLITE_SUPERVISOR",
)
"""Variables that aglite sets; a recipe may not."""

LONGEST_VALUE = 128 * 1024 - 1024
"""The kernel refuses an environment entry of 128 KiB."""

PROMPT_FIELDS = ("prompt", "instruction", "question", "text")
"""Where a task says what is to be done, in this order, if the recipe has no `agent.prompt`."""

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
    context_length: int,
    log: Path,
) -> Launch:
    """One attempt as a backend is asked to run it. `url` is the rollout's own prefix, without `/v1`; `context_length`
    counts tokens.

    `task` is the whole row; only its public part is used. Raises RecipeError naming what the agent section gets wrong.
    """
    kit = _kit(recipe, task, url=url, token=token, model=model, context_length=context_length)
    return Launch(
        rollout_id=rollout_id,
        attempt=attempt,
        command=kit.command,
        files=agent_files(recipe),
        home_files=kit.files,
        stdin=kit.stdin,
        task=task["public"],
        env=_environment(recipe, task, kit.env, url=url, token=token, model=model, rollout_id=rollout_id),
        limits=_limits(recipe),
        log=log,
        redactor=recipe.stored_redactor,
    )


def _limits(recipe: Recipe) -> Limits:
    limits = recipe.agent.limits
    return limits if recipe.retention.traffic == "all" else limits.model_copy(update={"log_bytes": 0})


def _kit(recipe: Recipe, task: Mapping[str, Any], *, url: str, token: str, model: str, context_length: int) -> Kit:
    """What the agent is launched with: the recipe's command, or what the preset of its harness makes of the task."""
    agent = recipe.agent
    if agent.harness is None:
        return Kit(agent.command, {})
    order = Order(
        prompt=prompt_of(recipe, task),
        url=url,
        token=token,
        model=Path(model).name,
        context_length=context_length,
        max_hold_s=recipe.gateway.max_hold_s,
        args=agent.harness_args,
    )
    kit = HARNESSES[agent.harness].kit(order)
    folder = harness_folder(recipe)
    if folder is None:
        return kit
    return replace(kit, command=[str(folder / kit.command[0]), *kit.command[1:]])


def program_of(recipe: Recipe) -> str:
    """The program that is launched, in whatever way a backend looks it up."""
    agent = recipe.agent
    if agent.harness is None:
        return agent.command[0]
    folder, program = harness_folder(recipe), HARNESSES[agent.harness].program
    return program if folder is None else str(folder / program)


def harness_folder(recipe: Recipe) -> Path | None:
    """`agent.harness_path` as a full path, of this machine or of the agent's image; None: the program is looked up on
    PATH."""
    given = recipe.agent.harness_path
    if given is None:
        return None
    return Path(given) if recipe.agent.in_container else recipe.folder / Path(given).expanduser()


def prompt_of(recipe: Recipe, task: Mapping[str, Any]) -> str:
    """What a harness is told to do in a task. Raises RecipeError if the task does not say it."""
    template = recipe.agent.prompt
    if template is None:
        name = next((name for name in PROMPT_FIELDS if name in task["public"]), None)
        if name is None:
            raise RecipeError(
                f"agent.prompt: missing, and task {task['id']!r} has none of {', '.join(PROMPT_FIELDS)} "
                f"in its public part, only {', '.join(task['public']) or 'nothing'}",
                'add what to tell the harness, such as `prompt: "{task.FIELD}"`, to the agent section',
            )
        template = f"{{task.{name}}}"
    prompt = fill(template, task, "agent.prompt", mend="put long texts into a file that the task names")
    if not prompt.strip():
        raise RecipeError(f"agent.prompt with task {task['id']!r}: it is empty", "give the harness something to do")
    return prompt


def _environment(
    recipe: Recipe,
    task: Mapping[str, Any],
    preset: Mapping[str, str],
    *,
    url: str,
    token: str,
    model: str,
    rollout_id: str,
) -> dict[str, str]:
    values = {name: fill(text, task, f"agent.env.{name}") for name, text in recipe.agent.env.items()}
    return {
        **preset,
        **values,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": token,
        "ANTHROPIC_MODEL": model,
        ROLLOUT_ID: rollout_id,
    }


def fill(
    text: str, task: Mapping[str, Any], where: str, mend: str = "read AGLITE_TASK_FILE in the agent instead"
) -> str:
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
        raise RecipeError(f"{where} with task {task['id']!r}: {problem}", mend)
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
    if agent.harness is not None and agent.backend == "local":
        find(HARNESSES[agent.harness], harness_folder(recipe))
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
    files = [(field, recipe.folder / source.partition(":")[0]) for field, source in sources]
    if recipe.reward:
        named = [(field, _inside(recipe.folder, name)) for field, name in names_of(recipe.reward)]
        files += [(field, file) for field, file in named if file is not None and file.is_file()]
    return files
