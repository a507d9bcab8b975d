"""The scratch files of a launch as a tar, the way into a container: task, home and working directory."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

from aglite.rollouts.backends import NOT_GIVEN, Launch


def pack(launch: Launch, more: Mapping[str, str] | None = None, *, gzipped: bool = False) -> tuple[IO[bytes], int]:
    """`work`, `home`, `task.json` and the texts `more` by their places as a tar, and its size in bytes. Close it."""
    file = tempfile.SpooledTemporaryFile(max_size=1 << 22)  # noqa: SIM115 - it is handed on
    try:
        mode: Any = {"mode": "w:gz", "compresslevel": 3} if gzipped else {"mode": "w"}
        # of long names, busybox knows GNU's way only
        with tarfile.open(fileobj=file, dereference=True, format=tarfile.GNU_FORMAT, **mode) as tar:
            for name in dict.fromkeys(("work", "home", launch.cwd)):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
            _add_text(tar, "task.json", json.dumps(launch.task))
            for place, text in launch.home_files.items():
                _add_text(tar, os.path.join("home", place), text)
            for place, text in (more or {}).items():
                _add_text(tar, place, text)
            if launch.tree is not None:
                _add_tree(tar, launch.tree, {_top(launch.cwd, place) for _, place in launch.files})
            for source, place in launch.files:
                tar.add(source, os.path.join(launch.cwd, place), filter=_plain)
    except BaseException:
        file.close()
        raise
    size = file.tell()
    file.seek(0)
    return file, size


def _add_tree(tar: tarfile.TarFile, tree: Path, replaced: Collection[str]) -> None:
    """The content of a folder as `work`, without what is `replaced`: a link there could lead other files astray."""
    tar.dereference = False
    for entry in sorted(tree.iterdir()):
        place = os.path.join("work", entry.name)
        if place not in replaced:
            tar.add(entry, place)
    tar.dereference = True


def _top(folder: str, place: str) -> str:
    return os.path.join(folder, place.partition("/")[0])


def _add_text(tar: tarfile.TarFile, place: str, text: str) -> None:
    data = text.encode()
    member = tarfile.TarInfo(place)
    member.size, member.mode = len(data), 0o644
    tar.addfile(member, io.BytesIO(data))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if os.path.basename(member.name) in NOT_GIVEN:
        return None
    member.mode |= 0o600 if member.isreg() else 0o700
    return member
