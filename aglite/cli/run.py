"""Commands that start, steer and end a run: up, attach, pause, resume, down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aglite.cli.options import Overrides, RunDirectory

RecipeOrNothing = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="A recipe's folder or file.", show_default=False)
]

STEER = "Steer a run"


def add(app: typer.Typer) -> None:
    app.command("up", rich_help_panel=STEER)(up)
    app.command("attach", rich_help_panel=STEER)(attach)
    app.command("pause", rich_help_panel=STEER)(pause)
    app.command("resume", rich_help_panel=STEER)(resume)
    app.command("down", rich_help_panel=STEER)(down)


def up(
    recipe: RecipeOrNothing = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="RUN_DIR", help="Where the run is kept; by default runs/<recipe name>."),
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Run here with plain progress lines, no terminal UI.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start in the background and come back.")] = False,
    must_resume: Annotated[bool, typer.Option("--resume", help="Go on with the run; fail if there is none.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an earlier run aside (it is renamed) and start over.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Training steps, in place of the recipe's.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train RECIPE: start its run, or go on with it."""
    if must_resume and fresh:
        raise typer.BadParameter("--resume and --fresh exclude each other")
    if headless and detach:
        raise typer.BadParameter("--headless and --detach exclude each other")
    from aglite.cli import start
    from aglite.config import load_recipe
    from aglite.paths import RunDir

    path = recipe or start.only_recipe()
    settings = [*(overrides or []), *([f"trainer.steps={steps}"] if steps is not None else [])]
    loaded = load_recipe(path, settings)
    run = RunDir(directory or Path("runs") / loaded.name)
    mode = "fresh" if fresh else "resume" if must_resume else "auto"
    if headless or not (detach or start.in_terminal()):
        from aglite.supervisor import run as supervise

        raise typer.Exit(supervise(loaded, run, mode=mode, on_line=start.say))
    arguments = [str(path), "--dir", str(run.path), *([f"--{mode}"] if mode != "auto" else [])]
    for setting in settings:
        arguments += ["--set", setting]
    pid = start.in_background(run, arguments, fresh=fresh)
    if detach:
        typer.echo(
            f"{loaded.name} runs in the background (process {pid}); look at it with\n  aglite attach --dir {run.path}"
        )
        return
    raise typer.Exit(start.watch(run))


def attach(directory: RunDirectory = None) -> None:
    """Open the terminal UI on a run, going or finished."""
    from aglite.cli import start
    from aglite.cli.where import find_run

    run = find_run(directory)
    raise typer.Exit(start.watch(run) if start.in_terminal() else start.follow(run))


def pause(directory: RunDirectory = None) -> None:
    """Hold everything until `aglite resume`."""
    run = _post(directory, "pause")
    typer.echo(f"{run} is pausing; `aglite resume` lets it go on")


def resume(directory: RunDirectory = None) -> None:
    """Let a paused run go on."""
    run = _post(directory, "resume")
    typer.echo(f"{run} goes on")


def down(
    directory: RunDirectory = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for an update or a checkpoint.")] = False,
) -> None:
    """Stop a run cleanly; `aglite up` goes on with it later."""
    from aglite.cli import stop
    from aglite.cli.where import find_run

    raise typer.Exit(stop.down(find_run(directory), now=now, on_line=typer.echo))


def _post(directory: Path | None, action: str) -> Path:
    from aglite.cli.where import find_run
    from aglite.client import ControlClient

    run = find_run(directory)
    ControlClient(run).post(action)
    return run.path
