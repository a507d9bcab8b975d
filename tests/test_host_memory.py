from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from aglite import host_memory
from aglite.host_memory import Group, groups

V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def group(folder: Path, names: tuple[str, str], limit: int | str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{text}\n")


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    group(tmp_path / "jobs", V2, 8000, 5000, "anon 9\ninactive_file 500")
    group(tmp_path / "jobs" / "one", V2, "max", 4000, "inactive_file 7")
    assert list(groups("0::/jobs/one\n", tmp_path)) == [Group(8000, 3500)]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    group(tmp_path / "memory", V1, 900, 1000, "inactive_file 1\ntotal_inactive_file 40")
    assert list(groups("4:cpu,memory:/not/seen/here\n1:cpu:/x\n", tmp_path)) == [Group(900, 0)]


def test_the_tightest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "groups", lambda own: iter([Group(20_000, 12_345), Group(30_000, 9_999)]))
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (20_000, 9_999)
    monkeypatch.setattr(host_memory, "groups", lambda own: iter([Group(1 << 62, 1 << 62)]))  # version 1: no limit
    assert host_memory.total_bytes() == psutil.virtual_memory().total
    assert 0 < host_memory.free_bytes() < host_memory.total_bytes()
