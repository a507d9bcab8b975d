"""What the shell can complete: runs, rollouts, recipes, tasks, models. Quick, and silent about what cannot be read.

Each function gets what was typed so far; with a list of pairs, shells that can show the second half as an explanation.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import typer

NEWEST = 200
"""Rollouts that are offered."""
Offers = list[tuple[str, str]]


def quiet(offer: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Offers]:
    """Nothing to offer where something goes wrong: an error message would land in the command line."""

    @wraps(offer)
    def offers(*args: Any, **named: Any) -> Offers:
        try:
            return list(offer(*args, **named))
        except Exception:  # whatever it is, the command itself will say it
            return []

    return offers


@quiet
def runs(incomplete: str) -> Iterator[tuple[str, str]]:
    """Run directories: those under ./runs, else folders."""
    from aglite.paths import RunDir

    for path in sorted(Path("runs").glob("*")):
        run = RunDir(path)
        if str(path).startswith(incomplete) and run.holds_run:
            yield str(path), "going" if run.control.exists() else ""
    if incomplete and not incomplete.startswith("runs"):
        yield from _folders(incomplete)


@quiet
def rollouts(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """The newest rollouts of the run that is meant."""
    from aglite.cli.where import find_run
    from aglite.store import Store
    from aglite.units import reward

    store = Store.open(find_run(_path(ctx.params.get("directory"))).db, readonly=True)
    try:
        for row in store.rollouts(limit=NEWEST):
            if row["id"].startswith(incomplete):
                worth = f", reward {reward(row['reward'])}" if row["reward"] is not None else ""
                yield row["id"], f"{row['task_id']}, {row['state']}{worth}"
    finally:
        store.close()


@quiet
def recipes(incomplete: str) -> Iterator[tuple[str, str]]:
    """Recipes here and under ./recipes, those that come with aglite, and folders."""
    from aglite import shipped

    offered = dict(shipped.offered())
    offered |= {str(file.parent): shipped.about(file.parent) for file in Path().glob("*/recipe.yaml")}
    yield from ((name, about) for name, about in offered.items() if name.startswith(incomplete))
    yield from ((path, "") for path, _ in _folders(incomplete) if incomplete and path.rstrip("/") not in offered)


@quiet
def tasks(incomplete: str) -> Iterator[tuple[str, str]]:
    """Ids of the recipe's tasks, where they are in .jsonl files: a function might take its time."""
    import json

    from aglite.config.load import find_recipe
    from aglite.recipe_file import read_mapping

    file = find_recipe(_typed()[2])
    for split, source in (read_mapping(file).get("tasks") or {}).items():
        if source.endswith(".jsonl"):
            for line in (file.parent / source).read_text(encoding="utf-8").splitlines():
                if line.strip() and (id := json.loads(line)["id"]).startswith(incomplete):
                    yield id, split


@quiet
def checkpoints(incomplete: str) -> Iterator[tuple[str, str]]:
    """Checkpoints of the runs under ./runs, and folders."""
    found = [str(path) for path in sorted(Path("runs").glob("*/checkpoints/step-*"))]
    yield from ((path, "") for path in found if path.startswith(incomplete))
    yield from (offer for offer in _folders(incomplete) if incomplete and not incomplete.startswith("runs"))


@quiet
def models(incomplete: str) -> Iterator[tuple[str, str]]:
    """Built-in models, checkpoints and folders."""
    from aglite.builtin_models import BUILTIN

    yield from ((name, "built in") for name in BUILTIN if name.startswith(incomplete))
    yield from checkpoints(incomplete)


@quiet
def harnesses(incomplete: str) -> Iterator[tuple[str, str]]:
    from aglite.harnesses import HARNESSES

    yield from ((name, "") for name in HARNESSES if name.startswith(incomplete))


@quiet
def states(incomplete: str) -> Iterator[tuple[str, str]]:
    from aglite.units import QUEUE

    yield from ((state, "") for state in QUEUE if state.startswith(incomplete))


@quiet
def settings(incomplete: str) -> Iterator[tuple[str, str]]:
    """Keys of a recipe for `--set`, with the beginning of what they mean."""
    from pydantic import BaseModel

    from aglite.config import Recipe

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in model.model_fields.items():
            options = getattr(field.annotation, "__args__", None) or (field.annotation,)
            section = next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)
            if section is not None:
                yield from walk(section, f"{prefix}{name}.")
            elif not field.exclude:
                yield f"{prefix}{name}=", (field.description or "").partition(".")[0]

    yield from (offer for offer in walk(Recipe, "") if offer[0].startswith(incomplete))


def _folders(incomplete: str) -> Iterator[tuple[str, str]]:
    """Folders whose path begins so, with a slash at the end."""
    base = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    for path in sorted(base.expanduser().glob("*/")):
        shown = f"{path}/"
        if shown.startswith(incomplete) and not path.name.startswith("."):
            yield shown, ""


def _typed() -> list[str]:
    """The words typed so far. An option that still lacks its value keeps typer from telling the arguments before it."""
    return shlex.split(os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "")


def _path(value: Any) -> Path | None:
    return None if value is None else Path(value)
