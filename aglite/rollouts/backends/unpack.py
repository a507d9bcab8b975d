"""Unpacking what an agent left: a tar that is hostile until shown otherwise."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from aglite.rollouts.backends.local import remove_tree
from aglite.rollouts.causes import BackendError, Cause

LONGEST_PLACE = 2048
"""Characters of a place within the tree."""


class TooMuch(Exception):
    """The tar holds more than was agreed."""


def unpack_left(archive: IO[bytes], folder: Path, *, most_bytes: int) -> tuple[int, int]:
    """Unpack what an agent left to `folder`/work, in place of what is in `folder`, and close `archive`; how many
    links and how many other members were left out. Blocks. Raises BackendError if it cannot be had."""
    try:
        remove_tree(folder)
        folder.mkdir(parents=True)
        with archive:
            return unpack(archive, folder / "work", most_bytes=most_bytes, most_files=1 << 20)
    except (TooMuch, tarfile.TarError, OSError) as error:
        raise BackendError(Cause("lost", f"what the agent left cannot be copied out: {error}")) from None


def unpack(file: IO[bytes], folder: Path, *, most_bytes: int, most_files: int) -> tuple[int, int]:
    """Unpack files, folders and links of a tar into `folder`, which must not exist; how many links and how many other
    members were left out.

    Nothing is written outside `folder` or through a link: links are made last, and only those that stay inside.
    Devices, pipes, absolute places and `..` are left out; set-id bits and owners are dropped. Raises TooMuch.
    """
    folder.mkdir(mode=0o700)
    left_links, left, bytes_left, files_left = 0, 0, most_bytes, most_files
    links: list[tuple[PurePosixPath, str]] = []
    with tarfile.open(fileobj=file, mode="r|", bufsize=1 << 18) as tar:
        for member in tar:
            place = PurePosixPath(member.name)
            files_left -= 1
            if files_left < 0 or (member.isreg() and member.size > bytes_left):
                raise TooMuch(f"more than {most_files:,} files or {most_bytes:,} bytes")
            if not _is_inside(place):
                left += 1
            elif member.isdir():
                (folder / place).mkdir(mode=0o700, parents=True, exist_ok=True)
            elif member.issym():
                links.append((place, member.linkname))
            elif member.isreg():
                bytes_left -= member.size
                _write(tar, member, folder / place)
            elif member.islnk() and _is_file(folder, PurePosixPath(member.linkname)):
                # a further name of a file that came earlier; there are no symbolic links yet
                (folder / place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.link(folder / member.linkname, folder / place)
            else:
                left += 1
    for place, target in links:
        if _stays_inside(place, target) and not _through_link(folder, place):
            (folder / place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.symlink(target, folder / place)
        else:
            left_links += 1
    return left_links, left


def _is_inside(place: PurePosixPath) -> bool:
    return not place.is_absolute() and ".." not in place.parts and 0 < len(str(place)) <= LONGEST_PLACE


def _is_file(folder: Path, place: PurePosixPath) -> bool:
    return _is_inside(place) and (folder / place).is_file()


def _stays_inside(place: PurePosixPath, target: str) -> bool:
    """Whether a link leads to a place in the tree, whatever other links it meets: it goes up only at its beginning, at
    most to the top, and from there on only down, where each further link is held to the same."""
    parts = PurePosixPath(target).parts
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return 0 < len(target) <= LONGEST_PLACE and target[0] != "/" and ups < len(place.parts) and ".." not in parts[ups:]


def _through_link(folder: Path, place: PurePosixPath) -> bool:
    """Whether the folder of `place` is not what its text says."""
    return any((folder / parent).is_symlink() for parent in place.parents)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    mode = 0o700 if member.mode & 0o100 else 0o600
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as target:
        while data := source.read(1 << 18):
            target.write(data)
