"""A library that is wanted and not there."""

from __future__ import annotations

import importlib.util

from aglite.errors import AgliteError


def library(name: str) -> None:
    """Raises AgliteError if `name` cannot be imported; does not import it."""
    if importlib.util.find_spec(name) is None:
        raise AgliteError(f"tracking: {name} is not installed", f"pip install {name}, or leave it out of `tracking`")
