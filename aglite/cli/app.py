"""The commands put together: a module a subject. What a command needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aglite import __version__
from aglite.cli import db, init, look, model, run

app = typer.Typer(
    name="aglite",
    help="Train a language model inside the agent program you already run, on one machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aglite {__version__}")
        raise typer.Exit()


@app.callback()
def aglite(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def command() -> Any:
    """The whole command line. Typer would show `<bool>` beside every option that is there or is not."""
    import typer.main

    def tidy(one: Any) -> None:
        for param in one.params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        for child in getattr(one, "commands", {}).values():
            tidy(child)

    tree = typer.main.get_command(app)
    tidy(tree)
    return tree


run.add(app)
look.add(app)
init.add(app)
model.add(app)
db.add(app)
