"""Where a harness is on this machine, and which version."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from aglite.errors import RecipeError
from aglite.harnesses.base import Harness


def search_path() -> str:
    """PATH as a local agent has it: the folder of aglite's own interpreter comes first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def find(harness: Harness, folder: Path | None) -> Path:
    """The harness's executable, in `folder` or on PATH. Raises RecipeError, which says how to install it."""
    if folder is not None:
        file = folder / harness.program
        if file.is_file() and os.access(file, os.X_OK):
            return file
        raise RecipeError(
            f"agent.harness_path: {folder} has no program {harness.program!r} ({harness.name})",
            f"name the folder that it is in (a virtual environment's bin), or install it: {harness.install}",
        )
    found = shutil.which(harness.program, path=search_path())
    if found is None:
        raise RecipeError(
            f"agent.harness: {harness.name} is not installed: there is no program {harness.program!r} on PATH",
            f"{harness.install}, or set agent.harness_path to the folder it is in",
        )
    return Path(found)


def version_of(harness: Harness, program: Path) -> str | None:
    """The installed version, as npm or pip noted it beside the executable; None if neither did."""
    file = program.resolve()
    for folder in file.parents:
        note = folder / "package.json"
        if note.is_file():
            package = json.loads(note.read_text())
            if package.get("name") == harness.package:
                return package["version"]
    name = harness.package.replace("-", "_")
    for found in file.parent.parent.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
        return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return None
