from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Aglite = Callable[..., Done]
