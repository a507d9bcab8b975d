"""Commands that start, steer and end a run: up, attach, pause, resume, kill, retry, down."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from aglite.cli import complete
from aglite.cli.options import AsJson, Overrides, RolloutId, RunDirectory

RecipeOrNothing = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's folder or file, or the name of one that comes with aglite; without it, they are listed.",
        show_default=False,
        autocompletion=complete.recipes,
    ),
]

Headless = Annotated[
    bool, typer.Option("--headless", help="No terminal UI: plain lines, with progress bars where this is a terminal.")
]

JsonLines = Annotated[bool, typer.Option("--json", help="Like --headless, with one JSON object a line.")]

STEER = "Steer a run"


def add(app: typer.Typer) -> None:
    app.command("up", rich_help_panel=STEER)(up)
    app.command("attach", rich_help_panel=STEER)(attach)
    app.command("pause", rich_help_panel=STEER)(pause)
    app.command("resume", rich_help_panel=STEER)(resume)
    app.command("kill", rich_help_panel=STEER)(kill)
    app.command("retry", rich_help_panel=STEER)(retry)
    app.command("down", rich_help_panel=STEER)(down)


def up(
    recipe: RecipeOrNothing = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="RUN_DIR",
            help="Where the run is kept; by default runs/<recipe name>.",
            autocompletion=complete.runs,
        ),
    ] = None,
    headless: Headless = False,
    as_json: JsonLines = False,
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
    if (headless or as_json) and detach:
        raise typer.BadParameter("--headless and --detach exclude each other")
    from aglite.cli import start
    from aglite.config import load_recipe
    from aglite.paths import RunDir

    path = recipe or start.chosen_recipe()
    settings = [*(overrides or []), *([f"trainer.steps={steps}"] if steps is not None else [])]
    loaded = load_recipe(path, settings)
    run = RunDir(directory or Path("runs") / loaded.name)
    mode = "fresh" if fresh else "resume" if must_resume else "auto"
    if headless or as_json or not (detach or start.in_terminal()):
        from aglite.output import choose
        from aglite.supervisor import run as supervise

        with contextlib.closing(choose(as_json=as_json)) as output:
            raise typer.Exit(supervise(loaded, run, mode=mode, on_line=output))
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


def attach(
    directory: RunDirectory = None,
    headless: Headless = False,
    as_json: JsonLines = False,
    readonly: Annotated[bool, typer.Option("--readonly", help="Only look: nothing of the run can be changed.")] = False,
) -> None:
    """Open the terminal UI on a run, going or finished."""
    from aglite.cli import start
    from aglite.cli.where import find_run

    run = find_run(directory)
    if start.in_terminal() and not (headless or as_json):
        raise typer.Exit(start.watch(run, readonly=readonly))
    from aglite.cli.follow import follow
    from aglite.output import choose

    with contextlib.closing(choose(as_json=as_json)) as output:
        follow(run, output)


def pause(directory: RunDirectory = None) -> None:
    """Hold everything until `aglite resume`."""
    run = _post(directory, "pause")
    typer.echo(f"{run} is pausing; `aglite resume` lets it go on")


def resume(directory: RunDirectory = None) -> None:
    """Let a paused run go on."""
    run = _post(directory, "resume")
    typer.echo(f"{run} goes on")


def kill(rollout: RolloutId, directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """End one rollout; it has no reward, and its group does without it."""
    _steer_rollout(directory, rollout, "kill", as_json)


def retry(rollout: RolloutId, directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """Launch a rollout again that failed or was killed, while its group still waits for others."""
    _steer_rollout(directory, rollout, "retry", as_json)


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


def _steer_rollout(directory: Path | None, name: str, action: str, as_json: bool) -> None:
    from aglite.cli.logs import whole_id
    from aglite.cli.where import find_run
    from aglite.client import ControlClient
    from aglite.stored import StoredRun

    run = find_run(directory)
    rollout_id = whole_id(StoredRun(run), name)
    answer = {"id": rollout_id, **ControlClient(run).post(f"rollouts/{rollout_id}/{action}")}
    typer.echo(json.dumps(answer) if as_json else f"rollout {rollout_id} is {answer['state']}")
