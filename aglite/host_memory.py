"""Memory of the machine that this process can have: of all there is, and of the control groups that it is in, as in a
container or a job of a cluster, where going over the limit ends it just the same.

Files: docs.kernel.org, admin-guide/cgroup-v2, "Memory", and cgroup-v1/memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class Group(NamedTuple):
    """A control group with a limit, in bytes."""

    limit: int
    left: int
    """What it can still give; files that it would drop first are counted as free."""


def total_bytes() -> int:
    """The most that this process, and all in its control groups with it, can have."""
    return min([psutil.virtual_memory().total, *(group.limit for group in groups(_own()))])


def free_bytes() -> int:
    """What can still be had."""
    return min([psutil.virtual_memory().available, *(group.left for group in groups(_own()))])


def _own() -> str:
    return Path("/proc/self/cgroup").read_text()


def groups(own: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Group]:
    """The control groups with a limit that a process is in. `own`: the text of its /proc/PID/cgroup."""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            # seen from within a container the path may lead nowhere; "max" is no limit
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield Group(limit, max(0, limit - used + int(stat.get(names[2], 0))))
