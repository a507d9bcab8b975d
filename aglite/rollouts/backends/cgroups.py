"""Control groups for agents of this machine: what a rollout's processes may use together, and the end of all of them.

One group a rollout, inside one of the run's, made before the agent starts in it. Both versions of the kernel's
interface will do, and a mixture: version 2 has one tree (a part of it must be ours to write to: delegated, or we are
root), version 1 a tree for each controller. Files and rules: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aglite.config import Limits
from aglite.rollouts import reap_child

log = logging.getLogger("aglite.rollouts")

WANTED = ("memory", "pids", "cpu")
PERIOD_US = 100_000
"""Over which processor time is shared out; the kernel's default."""
LEAST_QUOTA_US = 1000
OTHERS = "aglite-others"
"""Where the processes of a group go that is to have groups with controllers: it may not have processes itself then."""
TRIED_S = 20.0


class NoCgroups(Exception):
    """There are none that could be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group in which ours can be made."""

    folder: Path
    version: int
    controllers: frozenset[str]
    """Of WANTED, what groups made here are limited by."""
    crowded: bool = False
    """Whether it has processes that must go into a group of their own first (version 2)."""


def find_places(mountinfo: str | None = None, cgroup: str | None = None) -> list[Place]:
    """Where this process may make groups; changes nothing. Raises NoCgroups.

    `mountinfo` and `cgroup` are the texts of these files of /proc/self.
    """
    mounts = _mounts(Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo)
    if not mounts:
        raise NoCgroups("no control groups are mounted")
    own = _own_groups(Path("/proc/self/cgroup").read_text() if cgroup is None else cgroup)
    places, refused = [], []
    for mount in mounts:
        names = [name for name in ("", *WANTED) if name in mount.controllers]
        if not names:
            continue
        folder = mount.folder_of(own.get(names[0], "/"))
        place = _place_v2(mount.point, folder) if mount.version == 2 else _place_v1(mount, folder)
        if place:
            places.append(place)
        else:
            refused.append(str(folder))
    if not any(place.controllers for place in places):
        raise NoCgroups(f"{', '.join(refused)}: not writable" if refused else "none limits memory or processes")
    return places


class Cgroups:
    """The groups of one supervisor, in one of its own. Waits for processes to end: call its methods in a thread."""

    def __init__(self, places: Sequence[Place], supervisor: str, members: int = 1) -> None:
        """`supervisor`: `<random>@<run directory>`, see reaper.py. `members`: rollouts that run at a time."""
        random, _, run = supervisor.partition("@")
        self._of_run = f"aglite-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"
        self._name = f"{self._of_run}-{random}"
        self._places = places
        self._members = members

    @property
    def folders(self) -> list[str]:
        """The supervisor's group, in each tree."""
        return [str(place.folder / self._name) for place in self._places]

    @property
    def controllers(self) -> list[str]:
        """What limits a rollout: of WANTED."""
        return [name for name in WANTED if any(name in place.controllers for place in self._places)]

    def __str__(self) -> str:
        versions = sorted({place.version for place in self._places if place.controllers})
        return f"{', '.join(self.controllers)} (cgroup v{' and v'.join(map(str, versions))})"

    def open(self) -> None:
        """Make the group and try it, and end what earlier supervisors of the run left in theirs. Raises NoCgroups."""
        self.sweep()
        try:
            for place in self._places:
                if place.crowded:
                    _make_room(place.folder)
                _enable(place.folder, place)
                folder = place.folder / self._name
                folder.mkdir(exist_ok=True)
                _enable(folder, place)
                _weigh(folder, place, self._members)
            tried = self.make("try", Limits())
            shell = ["/bin/sh", "-c", tried.join_command]
            said = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIED_S)
            tried.end()
        except (OSError, subprocess.TimeoutExpired) as error:
            self.sweep()
            raise NoCgroups(str(error)) from None
        if said.returncode:
            self.sweep()
            raise NoCgroups(f"no process can be put into them: {said.stderr.strip()}")

    def try_out(self) -> None:
        """Raise NoCgroups if `open` would; leaves nothing behind. Not tried: moving processes of others."""
        if not any(place.crowded for place in self._places):
            self.open()
            self.sweep()

    def make(self, name: str, limits: Limits) -> Cgroup:
        """A new group with its limits set. Raises OSError."""
        folders = []
        try:
            for place in self._places:
                folder = place.folder / self._name / name
                folder.mkdir()
                folders.append(folder)
                _limit(folder, place, limits)
        except BaseException:
            _end([str(folder) for folder in folders])
            raise
        return Cgroup(folders)

    def sweep(self) -> list[int]:
        """End and delete all groups of the run; the ids of the processes that were ended."""
        found = [str(folder) for place in self._places for folder in place.folder.glob(f"{self._of_run}-*")]
        return _end(found)


class Cgroup:
    """The group of one attempt."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    @property
    def join_command(self) -> str:
        """For a shell: put it, and so what it becomes and starts, into the group."""
        files = (shlex.quote(str(folder / "cgroup.procs")) for folder in self._folders)
        return "".join(f"echo 0 >{file} || exit 125; " for file in files)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process of the group because its memory was used up."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(FileNotFoundError):
                    found = re.search(r"^oom_kill (\d+)", (folder / name).read_text(), re.MULTILINE)
                    if found and int(found[1]):
                        return True
        return False

    def end(self, dying_session: int | None = None) -> list[int]:
        """End what is in the group and delete it; the ids of what was ended, those of `dying_session` aside."""
        return _end([str(folder) for folder in self._folders], dying_session)


def _end(folders: Sequence[str], dying_session: int | None = None) -> list[int]:
    ended, left = reap_child.end_cgroups(folders, dying_session)
    if left:
        log.warning("control groups cannot be deleted: %s", ", ".join(left))
    return ended


# where groups can be made


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    root: str
    """The group that is seen at `point`."""
    point: Path
    controllers: frozenset[str]
    """Version 2: "", as /proc/self/cgroup has it."""

    def folder_of(self, group: str) -> Path:
        inside = os.path.relpath(group, self.root)
        folder = self.point if inside.startswith("..") else self.point / inside
        # In a container that shares the machine's namespace of groups, its own may not be there under its name.
        return folder if folder.is_dir() else self.point


def _mounts(mountinfo: str) -> list[_Mount]:
    found = {}
    for line in mountinfo.splitlines():
        mount, _, kind = line.partition(" - ")
        root, point = (_unescaped(word) for word in mount.split()[3:5])
        name, _, options = kind.split(" ", 2)
        if name == "cgroup2":
            one = _Mount(2, root, Path(point), frozenset({""}))
        elif name == "cgroup":
            one = _Mount(1, root, Path(point), frozenset(options.split(",")))
        else:
            continue
        found.setdefault((one.version, one.controllers), one)  # the first of several mounts of a tree
    return list(found.values())


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _own_groups(cgroup: str) -> dict[str, str]:
    """The group of this process by controller; version 2: by ""."""
    groups = {}
    for line in cgroup.splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), group)
    return groups


def _place_v1(mount: _Mount, folder: Path) -> Place | None:
    return Place(folder, 1, mount.controllers & frozenset(WANTED)) if os.access(folder, os.W_OK) else None


def _place_v2(top: Path, own: Path) -> Place | None:
    """The nearest group, from our own upwards, that passes controllers on already; failing that our own once its
    processes have made room, or the root of the tree, for which that rule does not hold."""
    folders = [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    usable = [folder for folder in folders if all(os.access(f, os.W_OK) for f in (folder, folder / "cgroup.procs"))]
    places = [Place(folder, 2, _words(folder / "cgroup.subtree_control") & frozenset(WANTED)) for folder in usable]
    for folder in usable:
        has = _words(folder / "cgroup.controllers") & frozenset(WANTED)
        if folder == top and not (folder / "cgroup.type").exists():
            places.append(Place(folder, 2, has))
        elif folder == own:
            places.append(Place(folder, 2, has, crowded=True))
    return max(places, key=lambda place: len(place.controllers & {"memory", "pids"}), default=None)


def _words(file: Path) -> frozenset[str]:
    try:
        return frozenset(file.read_text().split())
    except FileNotFoundError:
        return frozenset()


# writing


def _make_room(folder: Path) -> None:
    others = folder / OTHERS
    others.mkdir(exist_ok=True)
    while pids := (folder / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (others / "cgroup.procs").write_text(pid)


def _enable(folder: Path, place: Place) -> None:
    """Let the groups in `folder` be limited by the place's controllers."""
    if place.version == 2:
        control = folder / "cgroup.subtree_control"
        missing = place.controllers - _words(control)
        if missing:
            control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _weigh(folder: Path, place: Place, members: int) -> None:
    """Let a group get as much of the processors as so many processes outside of groups: by default, all in it together
    get what one does."""
    if "cpu" in place.controllers:
        if place.version == 2:
            (folder / "cpu.weight").write_text(str(min(100 * members, 10_000)))
        else:
            (folder / "cpu.shares").write_text(str(min(1024 * members, 262_144)))


def _limit(folder: Path, place: Place, limits: Limits) -> None:
    memory = limits.memory_mb << 20
    quota = max(LEAST_QUOTA_US, round(limits.cpus * PERIOD_US)) if limits.cpus else None
    if "memory" in place.controllers:
        if place.version == 2:
            (folder / "memory.max").write_text(str(memory))
            _write_if_there(folder / "memory.swap.max", "0")
        else:
            (folder / "memory.limit_in_bytes").write_text(str(memory))
            # of memory and swap together; without it, swap is not counted, and should not be used
            if not _write_if_there(folder / "memory.memsw.limit_in_bytes", str(memory)):
                _write_if_there(folder / "memory.swappiness", "0")
    if "pids" in place.controllers:
        (folder / "pids.max").write_text(str(limits.pids))
    if "cpu" in place.controllers and quota:
        if place.version == 2:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))


def _write_if_there(file: Path, text: str) -> bool:
    if not file.exists():
        return False
    file.write_text(text)
    return True
