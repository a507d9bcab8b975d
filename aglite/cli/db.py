"""Commands about a run's database: check, vacuum."""

from __future__ import annotations

import typer

from aglite.cli.options import RunDirectory


def add(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.callback()(_db)
    commands.command("check")(check)
    commands.command("vacuum")(vacuum)
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


def vacuum(directory: RunDirectory = None) -> None:
    """Give the space of removed rows back to the disk."""
    from sqlite_utils import Database

    from aglite.cli.where import find_run
    from aglite.lock import hold
    from aglite.store import Store
    from aglite.units import size

    run = find_run(directory)
    with hold(run):  # never beside a supervisor that writes
        Store.open(run.db, readonly=True).close()  # it is a database of aglite, or this says so
        before = run.db.stat().st_size
        database = Database(run.db)
        database.vacuum()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # only then the file itself shrinks
        database.close()
    typer.echo(f"{run.db}: {size(before)} before, {size(run.db.stat().st_size)} now")
