"""Commands about a run's database: check."""

from __future__ import annotations

import typer

from aglite.cli.options import RunDirectory


def add(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.callback()(_db)
    commands.command("check")(check)
    app.add_typer(commands, name="db", rich_help_panel="Look at a run")


def _db() -> None:
    """A run's database."""


def check(directory: RunDirectory = None) -> None:
    """Read the whole database and say what is wrong with it."""
    from aglite.cli.where import find_run
    from aglite.store import Store

    run = find_run(directory)
    store = Store.open(run.db, readonly=True)
    problems = store.check()
    store.close()
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{run.db} is whole")
