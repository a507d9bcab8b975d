"""Commands about a run's database: check, prune, redact, vacuum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from aglite.cli.options import AsJson, RunDirectory

if TYPE_CHECKING:
    from aglite.paths import RunDir
    from aglite.store import Store


def add(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.callback()(_db)
    for command in (check, prune, redact, vacuum):
        commands.command(command.__name__)(command)
    app.add_typer(commands, name="db", rich_help_panel="Look at a run")


def _db() -> None:
    """A run's database."""


def check(directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """Read the whole database and say what is wrong with it."""
    from aglite.cli.where import find_run
    from aglite.store import Store

    run = find_run(directory)
    store = Store.open(run.db, readonly=True)
    try:
        problems = store.check()
        unused = 0 if problems else store.unused_messages()
    finally:
        store.close()
    if as_json:
        _print_json({"ok": not problems, "problems": problems, "unused_messages": unused})
    else:
        for problem in problems:
            typer.echo(problem)
        if not problems:
            more = f"; {unused} messages belong to no call (`aglite db prune` removes them)" if unused else ""
            typer.echo(f"{run.db} is whole{more}")
    if problems:
        raise typer.Exit(1)


def prune(
    directory: RunDirectory = None,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0, help="Rollouts that ended longer ago than this."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Rollouts of the steps up to this one.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="Rollouts in this state (done, failed, error, cancelled); may be repeated."),
    ] = None,
    traffic: Annotated[
        Literal["none", "tokens"],
        typer.Option("--traffic", help="What is kept of theirs: nothing, or tokens without what was said."),
    ] = "none",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove recorded traffic: calls and logs of rollouts, whose rewards and numbers stay."""
    from aglite.retention import DAY_S, remove
    from aglite.store.rollouts import STATES

    for name in state or ():
        if name not in STATES:
            raise typer.BadParameter(f"{name!r} is no state; one of {', '.join(STATES)}", param_hint="--state")
    with _own(directory) as (run, store):
        days = older_than
        if days is None and step is None and not state and traffic == "none":
            days = ((store.meta("manifest") or {}).get("recipe") or {}).get("retention", {}).get("days")
            if days is None:
                raise typer.BadParameter(
                    "say what to remove, with --older-than, --step, --state or --traffic tokens (the run's recipe has "
                    "no retention.days)"
                )
        done = store.sync(
            remove(
                store,
                run,
                before=None if days is None else time.time() - days * DAY_S,
                step=step,
                states=state or None,
                text_only=traffic == "tokens",
                dry_run=dry_run,
            )
        )
        sizes = (0, 0) if dry_run else _vacuum(store, run)
    counts = {
        "rollouts": len(done.rollouts),
        "calls": done.calls,
        "messages": done.messages,
        "spared": len(done.spared),
        "dry_run": dry_run,
    }
    if as_json:
        _print_json({**counts, "bytes_before": sizes[0], "bytes_after": sizes[1], "backups": _backups(run)})
        return
    what = "what was said in" if traffic == "tokens" else "the traffic of"
    if dry_run:
        typer.echo(f"would remove {what} {len(done.rollouts)} rollouts")
    else:
        typer.echo(f"removed {what} {len(done.rollouts)} rollouts: {done.calls} calls, {done.messages} messages")
        _tell_sizes(run, sizes)
    if done.spared:
        typer.echo(f"{len(done.spared)} rollouts are kept: the run still needs them for training when it goes on")
    _tell_backups(run)


def redact(
    directory: RunDirectory = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option("--pattern", metavar="REGEX", help="Mask what this matches (RE2); may be given many times."),
    ] = None,
    named: Annotated[
        list[str] | None, typer.Option("--named", help="emails or api_keys; may be given many times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Mask text that is stored already, for good; tokens stay. By default with the patterns of the run's recipe."""
    from aglite.redact import NAMED, Redactor
    from aglite.shown import redactor_of

    unknown = [name for name in named or () if name not in NAMED]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}; one of {', '.join(NAMED)}", param_hint="--named")
    try:
        redactor = Redactor([*(NAMED[name] for name in named or ()), *(pattern or ())])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--pattern") from None
    with _own(directory) as (run, store):
        redactor = redactor or redactor_of(store)
        if not redactor:
            raise typer.BadParameter("say what to mask, with --pattern or --named (the run's recipe has no patterns)")
        changed = store.sync(store.mask(redactor))
        changed["logs"] = sum(_mask_log(log, redactor) for log in sorted((run.logs).rglob("*.log")))
        sizes = _vacuum(store, run)
    if as_json:
        _print_json({"changed": changed, "bytes_before": sizes[0], "bytes_after": sizes[1], "backups": _backups(run)})
        return
    parts = [f"{number} {table.replace('_', ' ')}" for table, number in changed.items() if number]
    typer.echo(f"masked text in {', '.join(parts) or 'nothing: no pattern matches'}")
    _tell_backups(run)


def vacuum(directory: RunDirectory = None, as_json: AsJson = False) -> None:
    """Give the space of removed rows back to the disk."""
    with _own(directory) as (run, store):
        sizes = _vacuum(store, run)
    if as_json:
        _print_json({"bytes_before": sizes[0], "bytes_after": sizes[1]})
    else:
        _tell_sizes(run, sizes)


@contextmanager
def _own(directory: Path | None) -> Iterator[tuple[RunDir, Store]]:
    """The run and its store, held so that no supervisor writes beside us. Raises AgliteError while one does."""
    from aglite.cli.where import find_run
    from aglite.lock import hold
    from aglite.store import Store

    run = find_run(directory)
    with hold(run):
        store = Store.open(run.db)
        try:
            yield run, store
        finally:
            store.close()


def _vacuum(store: Store, run: RunDir) -> tuple[int, int]:
    """Sizes of the database in bytes before and after; closes the store."""
    from aglite.store.db import vacuum

    before = run.db.stat().st_size
    store.close()
    vacuum(run.db)
    return before, run.db.stat().st_size


def _mask_log(log: Path, redactor: Any) -> bool:
    data = log.read_bytes()
    masked = redactor.data(data)
    if masked is data:
        return False
    part = log.with_suffix(".part")
    part.write_bytes(masked)
    part.chmod(0o600)
    part.replace(log)
    return True


def _backups(run: RunDir) -> list[str]:
    from aglite.store.db import backups

    return [str(path) for path in backups(run.db)]


def _tell_backups(run: RunDir) -> None:
    for path in _backups(run):
        typer.echo(f"{path}, a copy from before an upgrade, still has all of it: delete it when you need it no more")


def _tell_sizes(run: RunDir, sizes: tuple[int, int]) -> None:
    from aglite.units import size

    typer.echo(f"{run.db}: {size(sizes[0])} before, {size(sizes[1])} now")


def _print_json(value: Any) -> None:
    from aglite.cli.show import print_json

    print_json(value)
