"""The versions that were tried together, on a CPU and on a GPU, and whether those are installed."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from aglite.config import Recipe
from aglite.errors import AgliteError

CPU = {
    "torch": "2.13.0",
    "verl": "0.9.1",
    "transformers": "5.5.3 to 5.10",
    "tensordict": "0.10.0",
    "renderers": "0.1.12",
}
"""The set of the extra `cpu`."""

GPU = {
    "torch": "2.11.0",
    "vllm": "0.24.0",
    "verl": "0.9.1",
    "transformers": "5.9.0",
    "tensordict": "0.10.0",
    "renderers": "0.1.12",
}
"""The set of the extra `gpu`."""

NEEDED_FOR = {"renderers": "everything", "vllm": "engine.kind vllm"}
"""What a package is for, where it is not training and the embedded engine."""

Installed = Callable[[str], str]
"""The version of an installed package; raises PackageNotFoundError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One package: its version, None if it is not there, and whether that is the tried one."""

    name: str
    version: str | None
    tried: str
    mend: str

    @property
    def fits(self) -> bool:
        if self.version is None:
            return False
        if " to " in self.tried:
            low, high = (_numbers(end) for end in self.tried.split(" to "))
            return low <= _numbers(self.version) and _numbers(self.version)[: len(high)] <= high
        return self.version.partition("+")[0] == self.tried

    @property
    def detail(self) -> str:
        if self.version is None:
            return f"not installed; needed for {NEEDED_FOR.get(self.name, 'training and the embedded engine')}"
        return self.version if self.fits else f"{self.version}; tried with {self.tried}"


def installed_set(installed: Installed = metadata.version) -> str:
    """`gpu` where vLLM is installed beside aglite, else `cpu`."""
    try:
        installed("vllm")
    except metadata.PackageNotFoundError:
        return "cpu"
    return "gpu"


def findings(wanted: str = "", installed: Installed = metadata.version) -> list[Finding]:
    """The packages of the set `wanted`, by default that which is installed."""
    wanted = wanted or installed_set(installed)
    found = []
    for name, tried in (GPU if wanted == "gpu" else CPU).items():
        try:
            version: str | None = installed(name)
        except metadata.PackageNotFoundError:
            version = None
        found.append(Finding(name, version, tried, reinstall(wanted)))
    return found


def reinstall(wanted: str) -> str:
    """The command that installs a set."""
    return f"AGLITE_EXTRAS={wanted} bash quickstart.sh install"


def check_versions(recipe: Recipe, on_line: Callable[[str], None], installed: Installed = metadata.version) -> None:
    """Before a run trains: raise AgliteError for a package that it needs and that is not there; say which others are
    not those that were tried. Programs that stand in for the worker or for vLLM need none."""
    own_vllm = recipe.engine.own_vllm and not os.environ.get("AGLITE_VLLM")
    wanted = "gpu" if own_vllm else installed_set(installed)
    for one in findings(wanted, installed):
        if one.name == "vllm" and not own_vllm:
            continue
        if one.name not in NEEDED_FOR and os.environ.get("AGLITE_WORKER"):
            continue
        if one.version is None:
            raise AgliteError(f"{one.name} is {one.detail}", f"{one.mend} (or: pip install 'aglite[{wanted}]')")
        if not one.fits:
            on_line(f"{one.name} {one.detail}: {one.mend}")
    if recipe.trainer.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise AgliteError(
            "trainer.attention is flash_attention_2, and the package flash-attn is not installed",
            "install flash-attn for this torch, or use `attention: auto`",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
