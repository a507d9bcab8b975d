"""Which run a command is about. Standard library only: `aglite status` uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aglite.client import ControlClient
from aglite.errors import AgliteError
from aglite.paths import RunDir

if TYPE_CHECKING:
    from aglite.stored import StoredRun

RUNS = Path("runs")


def find_run(directory: Path | None) -> RunDir:
    """The run directory given, else the one we are in, else the one under ./runs that is going, else the one last
    written to."""
    if directory is not None:
        run = RunDir(directory)
        if not run.holds_run:
            raise AgliteError(
                f"{directory} is no run directory (it has no aglite.db)", "give one such as runs/instruct"
            )
        return run
    here = RunDir(Path.cwd())
    if here.holds_run:
        return here
    found = [run for run in map(RunDir, sorted(RUNS.glob("*"))) if run.holds_run]
    if not found:
        raise AgliteError(
            "no run found under ./runs", "start one with `aglite up recipes/instruct`, or name its directory with --dir"
        )
    return max(found, key=lambda run: (ControlClient(run).pid is not None, _written(run)))


def open_run(directory: Path | None) -> ControlClient | StoredRun:
    """What answers questions about a run: its supervisor while one runs, else its database."""
    run = find_run(directory)
    client = ControlClient(run)
    if client.pid is not None or not run.db.exists():
        return client
    from aglite.stored import StoredRun

    return StoredRun(run)


def _written(run: RunDir) -> float:
    files = (run.control, run.db, run.db.with_name(run.db.name + "-wal"))
    return max(file.stat().st_mtime for file in files if file.exists())
