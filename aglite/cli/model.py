"""Commands about models and single rollouts: run, eval, serve, doctor, model fetch."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from aglite.cli import complete
from aglite.cli.options import AsJson, Overrides, Split

TRY = "Try and use"


class SelfTest(StrEnum):
    """What can be tried on this machine."""

    gpu = "gpu"


class EngineKind(StrEnum):
    """Engines other than the embedded one."""

    vllm = "vllm"
    api = "api"


Recipe = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's folder or file, or the name of one that comes with aglite.",
        autocompletion=complete.recipes,
    ),
]


def add(app: typer.Typer) -> None:
    app.command("run", rich_help_panel=TRY)(run)
    app.command("eval", rich_help_panel=TRY)(evaluate)
    app.command("measure", rich_help_panel=TRY)(measure)
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
        str,
        typer.Option(
            "--task",
            metavar="ID",
            help="The task's id, from the training or validation tasks.",
            autocompletion=complete.tasks,
        ),
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
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="A checkpoint's folder; by default the recipe's model.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    split: Split = "val",
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=1,
            metavar="N",
            help="Rollouts per task; by default as many as the recipe or --k wants.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            min=1,
            metavar="K",
            help="Tell pass@K; may be given many times. By default 1, 2, 4, ... and N.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a recipe's tasks.

    It takes the first `evaluation.tasks` of them, each with the same seeds every time. A rollout solves its task with a
    reward of `evaluation.solved_at` or more. pass@K is the unbiased estimate from all N rollouts.
    """
    from aglite.config import load_recipe
    from aglite.evaluate import evaluate

    result = evaluate(
        load_recipe(recipe, overrides or []),
        checkpoint=checkpoint,
        split=split,
        n=n,
        ks=k or (),
        on_line=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_result(result)


def measure(
    recipe: Recipe,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Rollouts per task; by default the recipe's group_size.", show_default=False),
    ] = None,
    split: Split = "train",
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="Only the first so many.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="A checkpoint's folder; by default the recipe's model.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Sample every task some times before training, and say how hard they are."""
    from aglite.config import load_recipe
    from aglite.measure import measure, page

    result = measure(
        load_recipe(recipe, overrides or []),
        n=n,
        split=split,
        tasks=tasks,
        checkpoint=checkpoint,
        on_line=lambda line: typer.echo(line, err=True),
    )
    typer.echo(json.dumps(result) if as_json else "\n".join(page(result)))


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
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CHECKPOINT",
            help="A built-in name, a folder or a hub id.",
            autocompletion=complete.models,
        ),
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="RUN_DIR", help="Where traffic is recorded.", show_default=False)
    ] = None,
    engine_url: Annotated[
        str,
        typer.Option(
            "--engine-url", metavar="URL", help="A running vLLM server (or see --engine) that has the model loaded."
        ),
    ] = "",
    engine: Annotated[
        EngineKind | None,
        typer.Option(
            "--engine",
            help="What is at --engine-url, vllm by default; api: a Chat Completions endpoint, text only. Without an "
            "address: vllm starts a vLLM server for the model.",
            show_default=False,
        ),
    ] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="NAME", help="Environment variable with the key for --engine-url.")
    ] = "",
) -> None:
    """Serve a model to any agent, recording what it does."""
    from aglite.cli.start import say
    from aglite.paths import RunDir
    from aglite.serve import serve

    run_dir = RunDir(directory) if directory is not None else None
    if not engine_url and (key_env or engine is EngineKind.api):
        raise typer.BadParameter("give --engine-url too")
    settings: dict[str, Any] = {"kind": engine.value} if engine else {}
    if engine_url:
        settings = {"kind": (engine or EngineKind.vllm).value, "url": engine_url, "key_env": key_env}
    if engine is EngineKind.api:
        settings["model"] = model
    raise typer.Exit(serve(model, engine=settings, port=port, run_dir=run_dir, on_line=say))


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="Also check what this recipe needs.",
            show_default=False,
            autocompletion=complete.recipes,
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-gib",
            min=1,
            max=10_000,
            metavar="GIB",
            help="Plan the recipe's memory for a GPU of this size, such as 80, 40, 24.",
        ),
    ] = None,
    selftest: Annotated[
        SelfTest | None,
        typer.Option(
            "--selftest",
            help="Try everything that was written for a GPU on the one that is here, with the recipe's model or the "
            "demo's, and print a table to report back. Each item has up to 40 minutes.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ITEM", help="With --selftest: only this item; may be given many times."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and say what to mend."""
    from aglite.config import load_recipe
    from aglite.doctor import checks
    from aglite.memory_plan.table import table

    if selftest is None and only:
        raise typer.BadParameter("--only names items of the self-test; add --selftest gpu")
    if selftest is not None and gpu_gib is not None:
        raise typer.BadParameter("--gpu-gib plans for any GPU, --selftest tries the one here; leave out one of them")
    if recipe is None and (gpu_gib is not None or overrides):
        raise typer.BadParameter("--gpu-gib and --set are about a recipe; name one")
    if selftest is not None:
        model = load_recipe(recipe, overrides or []).model if recipe is not None else "smollm2-135m"
        raise typer.Exit(_selftest(model, only or [], as_json))
    found = checks(load_recipe(recipe, overrides or []) if recipe is not None else None, gpu_gib=gpu_gib)
    if as_json:
        typer.echo(json.dumps([check.as_json() for check in found]))
    else:
        marks = {"ok": "✓", "warning": "!", "error": "✗"}
        width = max((len(check.name) for check in found), default=0)
        for check in found:
            typer.echo(f"{marks[check.status]} {check.name:<{width}}  {check.detail}")
            if check.mend and check.status != "ok":
                typer.echo(f"  {'':<{width}}  -> {check.mend}")
        for check in found:
            if check.plan is not None:
                typer.echo("\n" + "\n".join(table(check.plan, check.card)))
    if any(check.status == "error" for check in found):
        raise typer.Exit(1)


def _selftest(model: str, only: list[str], as_json: bool) -> int:
    """Run the self-test; returns the exit code: 0 some passed and none failed, 1 some failed, 2 nothing was tried."""
    import tempfile

    from aglite.memory_plan.card import present_card
    from aglite.models import resolve_model
    from aglite.selftest import run

    def say(line: str) -> None:
        typer.echo(line, err=True)

    items = run.chosen(only)
    if present_card() is None:
        outcomes = [run.Outcome(item.name, "skip", run.NO_GPU) for item in items]
    else:
        bench = run.Bench(resolve_model(model, say), Path(tempfile.mkdtemp(prefix="aglite-selftest-")))
        outcomes = run.run_items(items, bench, say)
        say(f"logs are in {bench.scratch}")
    typer.echo(json.dumps(run.report(outcomes)) if as_json else "\n".join(run.lines_of(outcomes)))
    statuses = {outcome.status for outcome in outcomes}
    if statuses == {"skip"}:
        say("nothing was verified: every item was skipped")
    return 1 if "fail" in statuses else 0 if "pass" in statuses else 2


def fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A built-in name, a folder or a hub id.", autocompletion=complete.models),
    ],
) -> None:
    """Fetch a model into the cache, ready to use."""
    from aglite.models import fetch_model

    typer.echo(fetch_model(name, lambda line: typer.echo(line, err=True)))
