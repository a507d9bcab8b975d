"""Commands about models and single rollouts: run, eval, serve, doctor, model fetch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from aglite.cli.options import AsJson, Overrides

TRY = "Try and use"
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's folder or file.")]


def add(app: typer.Typer) -> None:
    app.command("run", rich_help_panel=TRY)(run)
    app.command("eval", rich_help_panel=TRY)(evaluate)
    app.command("serve", rich_help_panel=TRY)(serve)
    app.command("doctor", rich_help_panel=TRY)(doctor)
    models = typer.Typer(no_args_is_help=True)
    models.callback()(_models)
    models.command("fetch")(fetch)
    app.add_typer(models, name="model", rich_help_panel=TRY)


def _models() -> None:
    """Models on this machine."""


def run(
    recipe: Recipe,
    task: Annotated[
        str, typer.Option("--task", metavar="ID", help="The task's id, from the training or validation tasks.")
    ],
    overrides: Overrides = None,
) -> None:
    """Run the agent on one task, verbosely, without training."""
    from aglite.cli.start import say
    from aglite.config import load_recipe
    from aglite.try_one import try_one

    raise typer.Exit(try_one(load_recipe(recipe, overrides or []), task, on_line=say))


def evaluate(
    recipe: Recipe,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="PATH", help="A checkpoint's folder; by default the recipe's model."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Which tasks: train or val.")] = "val",
    n: Annotated[
        int, typer.Option("--n", min=1, metavar="K", help="Rollouts per task; from 2 on, pass@K is given too.")
    ] = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a recipe's tasks.

    It takes the first `evaluation.tasks` of them; solved means a reward of 1 or more, also for pass@K.
    """
    if split not in ("train", "val"):
        raise typer.BadParameter(f"{split!r}; train or val", param_hint="--split")
    from aglite.config import load_recipe
    from aglite.evaluate import evaluate

    result = evaluate(
        load_recipe(recipe, overrides or []),
        checkpoint=checkpoint,
        split=split,
        n=n,
        on_line=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    """Means with their 95% intervals, kinds apart, then the rewards of each task."""
    rows = [("mean reward", _interval(result)), ("solved", f"{result['solved']:.0%} of the rollouts")]
    rows += [(name, _interval(result[name])) for name in result if name.startswith("pass@")]
    rows += [(f"  {kind}", f"{mean:.3f}") for kind, mean in result["by_kind"].items()]
    if result["lost"]:
        rows.append(("not graded", f"{result['lost']} of the tasks"))
    rows += [(task, "  ".join(f"{reward:.2f}" for reward in each)) for task, each in result["rewards"].items()]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


def _interval(result: dict[str, Any]) -> str:
    return f"{result['mean']:.3f}  95%: {result['low']:.3f} to {result['high']:.3f}, {result['n']} tasks"


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_CHECKPOINT", help="A built-in name, a folder or a hub id.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="RUN_DIR", help="Where traffic is recorded.", show_default=False)
    ] = None,
) -> None:
    """Serve a model to any agent, recording what it does."""
    from aglite.cli.start import say
    from aglite.paths import RunDir
    from aglite.serve import serve

    run_dir = RunDir(directory) if directory is not None else None
    raise typer.Exit(serve(model, port=port, run_dir=run_dir, on_line=say))


def doctor(as_json: AsJson = False) -> None:
    """Check this machine, and say what to mend."""
    from aglite.doctor import checks

    found = checks()
    if as_json:
        fields = ("name", "status", "detail", "mend")
        typer.echo(json.dumps([{field: getattr(check, field) for field in fields} for check in found]))
    else:
        marks = {"ok": "✓", "warning": "!", "error": "✗"}
        width = max((len(check.name) for check in found), default=0)
        for check in found:
            typer.echo(f"{marks[check.status]} {check.name:<{width}}  {check.detail}")
            if check.mend and check.status != "ok":
                typer.echo(f"  {'':<{width}}  -> {check.mend}")
    if any(check.status == "error" for check in found):
        raise typer.Exit(1)


def fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in name, a folder or a hub id.")]) -> None:
    """Fetch a model into the cache, ready to use."""
    from aglite.models import fetch_model

    typer.echo(fetch_model(name, lambda line: typer.echo(line, err=True)))
