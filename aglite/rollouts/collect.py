"""What an agent left, as a grader may see it: a copy of the allowed part, without traps, and what was wrong with it.

The folder was written by somebody who wants reward: links that lead out, pipes that block a reader, files that are
larger than the disk, names in place of folders. Nothing here follows a link or trusts a size.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO

from aglite.rollouts.backends import NOT_GIVEN

DEEPEST = 64
"""Levels of folders that are looked into."""

OURS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
"""Errors that are this machine's trouble and not an agent's doing."""

BLOCK = 1 << 20
REPORTED = 20
"""Refused paths that are named; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is taken. Paths are relative, with `/`."""

    paths: Sequence[str] = ("**",)
    """Patterns of what may be changed: `*` and `?` within a name, `**` across folders; a folder means all in it."""
    owned: Sequence[str] = ()
    """Files and folders that are the grader's, whatever is there."""
    steering: frozenset[str] = frozenset()
    """Names of files that are the grader's wherever they lie, because they steer its programs."""
    max_files: int = 20_000
    max_bytes: int = 256 << 20
    originals: Mapping[str, Path] = field(default_factory=dict)
    """What the agent was given, file by file: left alone, it is no change."""


@dataclass(slots=True)
class Collected:
    files: int = 0
    bytes: int = 0
    flags: set[str] = field(default_factory=set)
    """touched_tests, outside_paths, symlinks, special_files, oversize: see `reward.on_flag`."""
    refused: list[str] = field(default_factory=list)
    """`flag: path` of the first ones."""

    def refuse(self, flag: str, path: str) -> None:
        self.flags.add(flag)
        if len(self.refused) < REPORTED:
            self.refused.append(f"{flag}: {path}")


def collect(source: Path, target: Path, rules: Rules) -> Collected:
    """Copy what may be graded of `source` to `target`, which is made; the rest of it is as in `rules.originals`.

    An agent may have deleted or replaced `source` itself: then it has left nothing.
    """
    copy = _Copy(target, rules)
    target.mkdir(parents=True)
    try:
        root = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in OURS:
            raise
        copy.found.refuse("special_files", ".")
    else:
        try:
            copy.folder(root, "", 0)
        finally:
            os.close(root)
    copy.restore_originals()
    copy.check_links()
    return copy.found


def originals_of(files: Sequence[tuple[Path, str]]) -> dict[str, Path]:
    """Every single file among what an agent is given (see `Launch.files`), by its place."""
    found = {}
    for source, place in files:
        if source.is_dir():
            for file in source.rglob("*"):
                parts = file.relative_to(source).parts
                if file.is_file() and not set(NOT_GIVEN) & set(parts):
                    found[str(PurePosixPath(place, *parts))] = file
        else:
            found[str(PurePosixPath(place))] = source
    return found


def fits(path: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names `path` or a folder above it."""
    return any(_compiled(pattern).fullmatch(path) for pattern in patterns)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/").removeprefix("./"))
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts) + "(?:/.*)?", re.DOTALL)


def _same(one: IO[bytes], other: IO[bytes]) -> bool:
    """Whether two files hold the same. `filecmp` would remember its answer by size and time, which an agent can set."""
    while block := one.read(BLOCK):
        if other.read(BLOCK) != block:
            return False
    return not other.read(1)


class _Copy:
    def __init__(self, target: Path, rules: Rules) -> None:
        self.found = Collected()
        self._target = target
        self._rules = rules
        self._seen: set[str] = set()
        self._links: list[str] = []

    def folder(self, fd: int, prefix: str, depth: int) -> None:
        """Take what is in an open folder of the source."""
        with os.scandir(fd) as entries:
            listed = []
            for entry in entries:
                if entry.name in NOT_GIVEN:
                    continue  # without a word: Python and git make them, and would believe an agent's
                listed.append(entry.name)
                if len(listed) > self._rules.max_files:
                    self.found.refuse("oversize", prefix or ".")
                    break
        for name in sorted(listed):
            path = f"{prefix}{name}"
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                self._entry(fd, name, path, info, depth)
            except OSError as error:
                if error.errno in OURS:
                    raise
                self.found.refuse("special_files", path)

    def _entry(self, fd: int, name: str, path: str, info: os.stat_result, depth: int) -> None:
        is_folder = stat.S_ISDIR(info.st_mode)
        if self._is_owned(path) or (name in self._rules.steering and not is_folder):
            if not self._is_untouched(fd, name, path, info, depth):
                self.found.refuse("touched_tests", path)
        elif not is_folder and any(owned.startswith(f"{path}/") for owned in self._rules.owned):
            self.found.refuse("touched_tests", path)  # in place of a folder that the tests are put in
        elif is_folder:
            self._folder(fd, name, path, depth)
        elif not fits(path, self._rules.paths):
            if not self._is_untouched(fd, name, path, info, depth):
                self.found.refuse("outside_paths", path)
        elif stat.S_ISLNK(info.st_mode):
            self._link(fd, name, path)
        elif stat.S_ISREG(info.st_mode):
            self._file(fd, name, path)
        else:
            self.found.refuse("special_files", path)

    def _is_owned(self, path: str) -> bool:
        return any(path == owned or path.startswith(f"{owned}/") for owned in self._rules.owned)

    def _is_untouched(self, fd: int, name: str, path: str, info: os.stat_result, depth: int) -> bool:
        """Whether it is as the agent was given it. Of a folder: whether everything in it is."""
        if stat.S_ISDIR(info.st_mode):
            if depth >= DEEPEST:
                return False
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                inside = {below: os.stat(below, dir_fd=inner, follow_symlinks=False) for below in os.listdir(inner)}
                return all(
                    self._is_untouched(inner, below, f"{path}/{below}", inside[below], depth + 1)
                    for below in inside
                    if below not in NOT_GIVEN
                )
            finally:
                os.close(inner)
        self._seen.add(path)
        original = self._rules.originals.get(path)
        if original is None or not stat.S_ISREG(info.st_mode) or info.st_size != original.stat().st_size:
            return False
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        with os.fdopen(file, "rb") as left, original.open("rb") as given:
            return _same(left, given)

    def _folder(self, fd: int, name: str, path: str, depth: int) -> None:
        if depth >= DEEPEST or not self._room(1, 0):
            self.found.refuse("oversize", path)
            return
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            if fits(path, self._rules.paths):
                self.found.files += 1
                (self._target / path).mkdir(parents=True, exist_ok=True)
            self.folder(inner, f"{path}/", depth + 1)
        finally:
            os.close(inner)

    def _file(self, fd: int, name: str, path: str) -> None:
        self._seen.add(path)
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        try:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):  # it became something else since it was listed
                self.found.refuse("special_files", path)
            elif not self._room(1, info.st_size):
                self.found.refuse("oversize", path)
            else:
                self.found.files += 1
                self.found.bytes += info.st_size
                self._write(source, path, info)
        finally:
            os.close(source)

    def _write(self, source: int, path: str, info: os.stat_result) -> None:
        target = self._target / path
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(info.st_mode) & 0o777 | 0o600
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            left = info.st_size  # not more, though it may grow meanwhile
            while left and (data := os.read(source, min(left, BLOCK))):
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(out, view) :]
        finally:
            os.close(out)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))

    def _link(self, fd: int, name: str, path: str) -> None:
        self._seen.add(path)
        if not self._room(1, 0):
            self.found.refuse("oversize", path)
            return
        goal = os.readlink(name, dir_fd=fd)
        if os.path.isabs(goal):
            self.found.refuse("symlinks", path)
            return
        self.found.files += 1
        link = self._target / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(goal)
        self._links.append(path)

    def _room(self, files: int, size: int) -> bool:
        return self.found.files + files <= self._rules.max_files and self.found.bytes + size <= self._rules.max_bytes

    def restore_originals(self) -> None:
        """What the agent was given where it may change nothing."""
        for path, source in self._rules.originals.items():
            steering = PurePosixPath(path).name in self._rules.steering
            owned = self._is_owned(path)
            if (owned or steering) and path not in self._seen:
                self.found.refuse("touched_tests", path)  # it was deleted
            if owned or (not steering and fits(path, self._rules.paths)):
                continue
            target = self._target / path
            self._clear_way(target.parent, path)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target)

    def _clear_way(self, folder: Path, path: str) -> None:
        """Make a folder in the copy, in place of links and files that the agent put there."""
        here = self._target
        for part in folder.relative_to(self._target).parts:
            here = here / part
            if here.is_symlink() or (here.exists() and not here.is_dir()):
                here.unlink()
                self.found.refuse("outside_paths", path)
            here.mkdir(exist_ok=True)

    def check_links(self) -> None:
        """Remove links that lead out of the copy, also by way of others."""
        root = os.path.realpath(self._target)
        for path in self._links:
            link = self._target / path
            if link.is_symlink():
                goal = os.path.realpath(link)
                if goal != root and not goal.startswith(f"{root}/"):
                    link.unlink()
                    self.found.refuse("symlinks", path)
