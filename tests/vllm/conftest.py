"""A vLLM of aglite's own that is a stand-in, and a scripted trainer: two real processes that write down every call."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from aglite.config import parse_recipe
from aglite.engine.collocated import Collocated, build
from aglite.engine.worker_client import WorkerClient
from aglite.gateway.renderers import load_renderer
from aglite.paths import RunDir

FAKE = Path(__file__).parents[1] / "helpers" / "fake_vllm.py"


class NoReaper:
    """Ends nothing: the tests end what they start."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.in_memory: list[Path] = []

    def add(self, pgid: int) -> None:
        self.groups.append(pgid)

    def watch_memory(self, path: Path) -> None:
        self.in_memory.append(path)


class Stage:
    """Makes pairs of vLLM and trainer in `folder`; `set` says how the stand-in behaves."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.model = model
        self.run_dir = RunDir(folder / "run")
        self.run_dir.create()
        self.reaper = NoReaper()
        self.stages: list[str] = []
        self.settings: dict[str, Any] = {"record": str(folder / "record.txt"), "token_s": 0.01}
        self.set()
        monkeypatch.setattr("aglite.engine.vllm_server.POLL_S", 0.05)
        monkeypatch.setenv("AGLITE_VLLM", f"{sys.executable} {FAKE} {folder / 'vllm.json'}")

    def set(self, **settings: Any) -> None:
        """May be called while it runs; it is read whole or not at all."""
        self.settings |= settings
        new = self.folder / "vllm.new"
        new.write_text(json.dumps(self.settings))
        new.rename(self.folder / "vllm.json")

    @property
    def calls(self) -> list[str]:
        """What was asked of the two, in order, without the details."""
        record = self.folder / "record.txt"
        lines = record.read_text().splitlines() if record.exists() else []
        return [" ".join(line.split()[:2]) for line in lines]

    def forget(self) -> None:
        (self.folder / "record.txt").write_text("")

    @contextlib.asynccontextmanager
    async def pair(
        self, *, script: dict[str, Any] | None = None, start: bool = True, trainer: bool = True, **engine: Any
    ) -> AsyncIterator[Collocated]:
        recipe = parse_recipe(
            {
                "name": "pair",
                "model": str(self.model),
                "tasks": {"train": "none", "val": "none"},
                "agent": {"backend": "external"},
                "engine": {"kind": "vllm", "context_length": 512, **engine},
            },
            Path("test"),
        )
        (self.folder / "script.json").write_text(json.dumps({"record": self.settings["record"], **(script or {})}))
        async with contextlib.AsyncExitStack() as closing:
            worker = None
            if trainer:
                worker = WorkerClient(
                    [sys.executable, "-m", "aglite.engine.scripted", "--script", str(self.folder / "script.json")],
                    log_path=self.run_dir.logs / "worker.log",
                )
                closing.push_async_callback(worker.stop)
                await worker.start()
            made = build(
                recipe,
                self.run_dir,
                self.model,
                load_renderer(self.model).tokenizer,
                trainer=worker,
                reaper=self.reaper,  # type: ignore[arg-type]
                env={"PATH": "/usr/bin:/bin"},
                on_stage=self.stages.append,
            )
            closing.push_async_callback(made.stop)
            if start:
                await made.start(self.model, {}, 0, None)
                self.forget()
            yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def stage(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, model, monkeypatch)
