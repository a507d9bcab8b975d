"""Checkpoint folders: a loadable Hugging Face model with the trainer's state beside it.

    step-N/            config.json, tokenizer files, model.safetensors (the weights as they are; adapters merged)
    step-N/trainer/    state.pt: optimizer and random state; the adapter, where one is trained, in peft's files
    step-N/aglite.json meta

A folder is written as `step-N.tmp`, synced to the disk and renamed, so that `step-N` is whole whenever it exists.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from aglite.errors import AgliteError, DiskFullError

META = "aglite.json"
ADAPTER = "adapter_model.safetensors"
FORMAT = 1

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


@dataclass(slots=True)
class State:
    """What a checkpoint folder holds; `adapter` instead of `weights` where one was trained."""

    weights: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor] | None
    optimizer: dict[str, Any]
    rng: torch.Tensor
    meta: dict[str, Any]


def save(
    path: Path,
    model_dir: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    optimizer: dict[str, Any],
    meta: dict[str, Any],
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint; an older folder of the same name is replaced. Raises DiskFullError when there is no room, and
    then leaves everything as it was. `also` writes more into the trainer's folder."""
    tensors = dict(weights)
    need = _bytes(tensors) + _bytes(optimizer)
    with _whole_folder(path, need) as folder:
        _write_model(folder, model_dir, tensors)
        (folder / "trainer").mkdir()
        with (folder / "trainer" / "state.pt").open("wb") as file:
            torch.save({"optimizer": optimizer, "rng": torch.get_rng_state()}, file)
        if also is not None:
            also(folder / "trainer")
        (folder / META).write_text(json.dumps({"format": FORMAT, "meta": meta}))


def export(path: Path, model_dir: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the model alone, whole or not at all."""
    tensors = dict(weights)
    with _whole_folder(path, _bytes(tensors)) as folder:
        _write_model(folder, model_dir, tensors)


def load(path: Path) -> State:
    """Read a checkpoint. Raises AgliteError if it is none, or of a newer aglite."""
    try:
        about = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise AgliteError(f"{path} is no checkpoint ({error})", "give a step-N folder of a run") from None
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise AgliteError(f"{path} is no checkpoint ({META} is not aglite's)", "give a step-N folder of a run")
    if about["format"] > FORMAT:
        raise AgliteError(f"{path} was written by a newer aglite", "upgrade aglite")
    try:
        file = path / "trainer" / ADAPTER
        adapter = load_file(file) if file.is_file() else None
        weights = load_file(path / "model.safetensors") if adapter is None else {}
        state = torch.load(path / "trainer" / "state.pt", weights_only=True)
        return State(weights, adapter, state["optimizer"], state["rng"], about["meta"])
    except (OSError, EOFError, RuntimeError, SafetensorError, UnpicklingError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise AgliteError(f"the checkpoint {path} is damaged: {what}", "resume from an older one") from None


def _write_model(folder: Path, model_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    for file in sorted(model_dir.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name != META:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@contextmanager
def _whole_folder(path: Path, need: int) -> Iterator[Path]:
    """A new folder that becomes `path` when the block is done, and vanishes when it fails. `need` is in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    full = DiskFullError(
        f"{path.name} needs {need / 1e6:,.0f} MB, and {path.parent} has {free / 1e6:,.0f} MB left; nothing was written",
        "free some disk space, or lower trainer.keep_last",
    )
    if free < need:
        raise full
    try:
        temporary.mkdir()
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            _sync(file)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | RuntimeError | SafetensorError) and _is_full(error, path.parent, need):
            raise full from error
        raise
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_full(error: BaseException | None, folder: Path, need: int) -> bool:
    """Whether a write failed for want of space: safetensors tells it in its text, torch in the error behind its own."""
    while error is not None:
        numbered = re.search(r"\(os error (\d+)\)", str(error))
        if (int(numbered[1]) if numbered else getattr(error, "errno", None)) in _FULL:
            return True
        error = error.__context__
    return shutil.disk_usage(folder).free < need


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(map(_bytes, tree.values()))
    return sum(map(_bytes, tree)) if isinstance(tree, list | tuple) else 0
