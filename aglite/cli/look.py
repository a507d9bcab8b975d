"""Commands that read a run: status, rollouts, show, logs, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aglite.cli.options import AsJson, RunDirectory

LOOK = "Look at a run"
RolloutId = Annotated[str, typer.Argument(metavar="ROLLOUT", help="Its id, or enough of the id to be the only one.")]


def add(app: typer.Typer) -> None:
    app.command("status", rich_help_panel=LOOK)(status)
    app.command("rollouts", rich_help_panel=LOOK)(rollouts)
    app.command("show", rich_help_panel=LOOK)(show)
    app.command("logs", rich_help_panel=LOOK)(logs)
    app.command("export", rich_help_panel=LOOK)(export)


def status(directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """Where a run stands, on one screen."""
    from aglite.cli import status

    status.show(directory, as_json)


def rollouts(
    directory: RunDirectory = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help="Only those: queued, starting, running, grading, done, failed, error, cancelled."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only those that this step trained.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many, the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """List rollouts, newest first."""
    from aglite.cli import show
    from aglite.cli.where import open_run
    from aglite.units import QUEUE

    if state is not None and state not in QUEUE:
        raise typer.BadParameter(f"{state!r} is no state; one of {', '.join(QUEUE)}", param_hint="--state")
    rows = open_run(directory).rollouts(state=state, step=step, limit=limit)
    show.print_json(rows) if as_json else sys.stdout.write(show.table(rows))


def show(
    rollout: RolloutId,
    directory: RunDirectory = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With token ids, log-probabilities and policy versions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """One rollout: its calls, what was said, its reward."""
    from aglite.cli import show

    show.rollout(directory, rollout, tokens=tokens, as_json=as_json)


def logs(
    rollout: RolloutId,
    directory: RunDirectory = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="An earlier launch; by default the last.")
    ] = None,
) -> None:
    """What the agent of a rollout printed."""
    from aglite.cli import show

    show.logs(directory, rollout, attempt)


def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write; `-` is standard output.")],
    what: Annotated[str, typer.Option("--what", help="samples, calls or rollouts.")] = "samples",
    form: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    directory: RunDirectory = None,
) -> None:
    """Write samples, calls or rollouts to a file."""
    from aglite import export
    from aglite.cli.where import find_run

    for name, value, choices in (("--what", what, export.WHAT), ("--format", form, export.FORMATS)):
        if value not in choices:
            raise typer.BadParameter(f"{value!r}; one of {', '.join(choices)}", param_hint=name)
    number = export.export(find_run(directory), what, form, out)
    typer.echo(f"{number} {what} written to {out}", err=True)
