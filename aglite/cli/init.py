"""`aglite init`: a recipe to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aglite.cli import complete


def add(app: typer.Typer) -> None:
    app.command("init", rich_help_panel="Try and use")(init)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write it; by default here.", show_default=False)
    ] = Path(),
    harness: Annotated[
        str | None,
        typer.Option(
            "--harness",
            metavar="NAME",
            help="Let this agent program do the task: mini-swe-agent, openhands, opencode, codex or claude-code.",
            autocompletion=complete.harnesses,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A built-in name, a folder or a hub id.",
            autocompletion=complete.models,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a small recipe that runs, to change into one of your own."""
    from aglite.harnesses import HARNESSES
    from aglite.new_recipe import next_steps, write_recipe

    if harness is not None and harness not in HARNESSES:
        raise typer.BadParameter(f"{harness!r}; one of {', '.join(HARNESSES)}", param_hint="--harness")
    names = write_recipe(folder, harness=harness, model=model)
    typer.echo(f"wrote {', '.join(names)} in {folder.resolve()}")
    for line in next_steps(folder, harness):
        typer.echo(f"  {line}")
