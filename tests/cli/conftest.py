from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_done import Aglite, Done
from fake_daemon import FakeDaemon, running
from recorded_run import recorded_run

from aglite.__main__ import main
from aglite.paths import RunDir


@pytest.fixture
def aglite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Aglite:
    """Run `aglite ARGS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["aglite", *args])
        capsys.readouterr()
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        return Done(int(code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A supervisor in runs/instruct that answers what a test wants."""
    daemon = FakeDaemon(RunDir(tmp_path / "runs" / "instruct"), running())
    yield daemon
    daemon.end()


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """A run that has ended, in runs/words."""
    return recorded_run(tmp_path / "runs" / "words")
