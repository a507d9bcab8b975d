"""A model's folder in the Hugging Face form: whether it is whole. And what fetching one needs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aglite.errors import AgliteError

Progress = Callable[[str], None]

MB = 1_000_000

CPU_CONTEXT = 4096
"""Longest context by default on the CPU, where a longer one would not be trained in any useful time, and of the
embedded engine wherever it is."""


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""What a config.json says as one number above 0, where it says it."""


class ModelError(AgliteError):
    """A model that cannot be found, fetched or used."""


def cpu_context(folder: Path) -> int:
    """CPU_CONTEXT tokens of context, where the recipe names none; at most as many as the model was made for."""
    config = json.loads((folder / "config.json").read_text())
    return min(CPU_CONTEXT, text_of(config).get("max_position_embeddings") or CPU_CONTEXT)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part about the language model: a model that also sees has it in a section of its own."""
    return {**config, **(config.get("text_config") or {})}


def check_folder(folder: Path, *, weights: bool = True) -> Path:
    """`folder` itself if it holds a whole model (config, tokenizer, safetensors weights); otherwise ModelError."""

    def bad(what: str) -> ModelError:
        mend = "give a Hugging Face folder: config.json, tokenizer.json and *.safetensors"
        return ModelError(f"model folder {folder}: {what}", mend)

    for file, what in (("config.json", "a configuration"), ("tokenizer.json", "a tokenizer")):
        if not (folder / file).is_file():
            raise bad(f"no {file} ({what})")
        try:
            found = json.loads((folder / file).read_text())
        except (ValueError, OSError) as error:
            raise bad(f"{file} cannot be read ({error})") from None
        if not isinstance(found, dict):
            raise bad(f"{file} holds no JSON object, so it is not {what}")
        if file == "config.json" and (problem := _config_problem(found)):
            raise bad(f"{file}: {problem}")
    if not weights:
        return folder
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError
        except (ValueError, KeyError, AttributeError, TypeError):
            raise bad(f"{index.name} cannot be read") from None
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise bad("no weights (*.safetensors)")
    for file in names:
        problem = _safetensors_problem(folder / file)
        if problem:
            raise bad(f"{file} {problem}")
    return folder


def _config_problem(config: dict[str, Any]) -> str | None:
    """Why a configuration cannot be worked with; None if nothing is wrong at first sight."""
    if not isinstance(config.get("text_config") or {}, dict):
        return f"text_config is no section (it is {config['text_config']!r})"
    for name in SIZES:
        value = text_of(config).get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return f"{name} is no whole number above 0 (it is {value!r})"
    return None


def _safetensors_problem(file: Path) -> str | None:
    """Why `file` is no whole safetensors file, from its header alone; None if it is one."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return "is no safetensors file (cut short, or only a Git LFS pointer)"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError):
            return "is no safetensors file"
    return None if size == expected else f"has {size} bytes where its header says {expected}; copy it again"


@contextlib.contextmanager
def watch(line: Callable[[], str], report: Progress, every_s: float = 2.0) -> Iterator[None]:
    """Report `line()` now and then while the body runs."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(every_s):
            report(line())

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while we look
            total += file.lstat().st_size if file.is_file() and not file.is_symlink() else 0
    return total
