"""What an item of the self-test works with, and how it says what it found."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aglite.config import Recipe, parse_recipe
from aglite.memory_plan.shape import text_of

Figures = dict[str, Any]
"""What an item measured, by name; numbers and short texts."""


class Skip(Exception):
    """An item that cannot be tried here, and why."""


class Failed(Exception):
    """An item whose result is wrong; what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Bench:
    """`device` is `cuda`; the tests of aglite itself run the items on the `cpu`, as far as they go."""

    model: Path
    scratch: Path
    """A folder that all items share; `folder` gives one of an item's own."""
    device: str = "cuda"

    def folder(self, name: str) -> Path:
        """An empty folder of an item's own."""
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def rows(self, count: int = 4, length: int = 96) -> list[list[int]]:
        """Token ids, the same each time: rows of different lengths, two of which begin alike."""
        vocabulary = text_of(json.loads((self.model / "config.json").read_text()))["vocab_size"]
        rng = np.random.default_rng(7)
        found = [rng.integers(3, vocabulary, length - 8 * place).tolist() for place in range(count)]
        found[1][: length // 2] = found[0][: length // 2]
        return found


def recipe_with(model: Path, **sections: Any) -> Recipe:
    """A recipe of which only the settings are used: it has neither tasks nor agents."""
    nobody = {"tasks": {"train": "none", "val": "none"}, "agent": {"backend": "external"}}
    return parse_recipe({"name": "selftest", "model": str(model), **nobody, **sections}, Path("selftest"))


def expect(condition: bool, words: str) -> None:
    """Raise Failed with `words` where the condition does not hold."""
    if not condition:
        raise Failed(words)


def largest_gap(one: list[list[float]], other: list[list[float]]) -> float:
    """Of the log-probabilities of the same rows."""
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def mean_gap(one: list[list[float]], other: list[list[float]]) -> float:
    gaps = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(gaps) / len(gaps)
