"""Commands that read a run: status, steps, rollouts, show, logs, export, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aglite.cli import complete
from aglite.cli.options import AsJson, RolloutId, RunDirectory, Split

LOOK = "Look at a run"


def add(app: typer.Typer) -> None:
    app.command("status", rich_help_panel=LOOK)(status)
    app.command("steps", rich_help_panel=LOOK)(steps)
    app.command("rollouts", rich_help_panel=LOOK)(rollouts)
    app.command("show", rich_help_panel=LOOK)(show)
    app.command("tasks", rich_help_panel=LOOK)(tasks)
    app.command("logs", rich_help_panel=LOOK)(logs)
    app.command("shell", rich_help_panel=LOOK)(shell)
    app.command("export", rich_help_panel=LOOK)(export)
    app.command("report", rich_help_panel=LOOK)(report)


def status(directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """Where a run stands, on one screen."""
    from aglite.cli import status

    status.show(directory, as_json)


def steps(directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """The training steps: rewards, staleness, gradients, one line each."""
    from aglite.cli import show, steps
    from aglite.cli.where import open_run

    rows = open_run(directory).steps()
    show.print_json(rows) if as_json else sys.stdout.write(steps.table(rows))


def rollouts(
    directory: RunDirectory = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            help="Only those: queued, starting, running, grading, done, failed, error, cancelled.",
            autocompletion=complete.states,
        ),
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


def tasks(
    directory: RunDirectory = None,
    split: Split = "train",
    as_json: AsJson = False,
) -> None:
    """How each task of a run went over time."""
    from aglite.cli.show import print_json
    from aglite.cli.where import find_run
    from aglite.stored import StoredRun
    from aglite.task_history import table, task_history

    stored = StoredRun(find_run(directory))  # its store is open as long as it is there
    found = task_history(stored.store.task_rewards(split))
    resting = stored.store.meta("resting", []) if split == "train" else []
    if as_json:
        print_json([{**task, "resting": task["task_id"] in resting} for task in found])
    else:
        typer.echo("\n".join(table(found, resting)))


def logs(
    rollout: RolloutId,
    directory: RunDirectory = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="An earlier launch; by default the last.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added until the rollout has ended.")
    ] = False,
) -> None:
    """What the agent of a rollout printed."""
    from aglite.cli import logs

    (logs.follow if follow else logs.logs)(directory, rollout, attempt)


def shell(rollout: RolloutId, directory: RunDirectory = None) -> None:
    """A shell beside the agent of a rollout that runs: in its container, its pod or its scratch directory."""
    from aglite.cli.shell import shell

    raise typer.Exit(shell(directory, rollout))


def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write; `-` is standard output.")],
    what: Annotated[str, typer.Option("--what", help="samples, calls, rollouts, steps or evaluations.")] = "samples",
    form: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TRACKER",
            help="tensorboard, wandb or trackio: write its steps and evaluations for this one; FILE is a folder then.",
            show_default=False,
        ),
    ] = None,
    directory: RunDirectory = None,
    tokens: Annotated[
        bool | None,
        typer.Option(
            "--tokens/--no-tokens",
            help="With token ids or without; to be said where the run's text is masked, as they reveal it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write what was recorded to a file: samples, calls, rollouts, steps or evaluations."""
    from aglite import export
    from aglite.cli.where import find_run
    from aglite.columns import COLUMNS

    choosing = [("--what", what, COLUMNS), ("--format", form, export.FORMATS)]
    for name, value, choices in [*choosing, *([("--to", to, export.TRACKERS)] if to else [])]:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}; one of {', '.join(choices)}", param_hint=name)
    run = find_run(directory)
    if to is not None:
        number, what = export.track(run, to, out), f"steps and evaluations for {to}"
    else:
        number = export.export(run, what, form, out, tokens=tokens)
    typer.echo(f"{number} {what} written to {out}", err=True)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR]...",
            help="Run directories, to be compared side by side; by default the one that other commands take.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Tell runs, going or ended, in one HTML file: curves, phases, cost, failures."""
    from aglite.cli.where import find_run
    from aglite.report.page import write_report

    found = [find_run(path) for path in runs or [None]]
    number = write_report(found, out)
    typer.echo(f"{out}: {number} figures of {', '.join(str(run.path) for run in found)}", err=True)
