"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="RUN_DIR",
        help="The run directory; by default the one under ./runs that is going, else the latest.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a setting of the recipe; may be given many times."),
]
