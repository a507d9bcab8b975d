"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aglite.cli import complete

RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="RUN_DIR",
        help="The run directory; by default the one we are in, or the one under ./runs that is going, else the latest.",
        autocompletion=complete.runs,
    ),
]
RolloutId = Annotated[
    str,
    typer.Argument(
        metavar="ROLLOUT", help="Its id, or enough of the id to be the only one.", autocompletion=complete.rollouts
    ),
]


def _split(name: str) -> str:
    if name not in ("train", "val"):
        raise typer.BadParameter(f"{name!r}; train or val")
    return name


Split = Annotated[str, typer.Option("--split", help="Which tasks: train or val.", callback=_split)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change a setting of the recipe; may be given many times.",
        autocompletion=complete.settings,
    ),
]
