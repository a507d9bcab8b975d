"""Tracking in a run: followed, gone on with, and no matter of training when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from mini_run import MiniRun
from test_writers import tensorboard_curves

from aglite.paths import RunDir
from aglite.rollouts.reaper import Reaper
from aglite.store import Store
from aglite.tracking import children
from aglite.tracking.children import Trackers


def rewards(run: MiniRun) -> list[tuple[int, float]]:
    live = [row for row in run.store().steps() if row["state"] != "rolled_back"]
    return [(row["step"], pytest.approx(row["metrics"]["reward_mean"])) for row in live]


def test_a_run_that_is_killed_and_gone_on_with_is_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = MiniRun(
        tmp_path,
        tracking=["tensorboard"],
        algorithm={"mode": "sync"},
        trainer={"steps": 4, "checkpoint_every": 2},
        script={"latency_s": 0.02},
        held_step=4,
    )
    run.start()
    run.until(lambda store: any(row["step"] == 3 for row in store.steps()))
    run.kill()
    run.go()
    assert run.gone(), run.leftovers()
    code, output = run.up()
    assert code == 0, output
    assert any(row["state"] == "rolled_back" for row in run.store().steps())
    curves = tensorboard_curves(run.run_dir.tracking / "tensorboard")
    assert curves["train/reward_mean"] == rewards(run)
    assert [step for step, _ in curves["validation/mean"]] == [0, 4]
    assert run.gone()


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("raise RuntimeError('no such account')", "RuntimeError: no such account"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11"),
    ],
    ids=["raises", "dies"],
)
def test_a_writer_that_fails_says_so_once_and_stops_nothing(tmp_path: Path, library: str, said: str) -> None:
    fake = tmp_path / "libraries"
    fake.mkdir()
    (fake / "wandb.py").write_text(library)
    run = MiniRun(tmp_path / "run", tracking=["wandb", "tensorboard"])
    run.worker = {
        "AGLITE_WORKER": "aglite.engine.scripted",
        "AGLITE_SCRIPT": str(run.folder / "script.json"),
        "PYTHONPATH": f"{fake}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    code, output = run.up()
    assert code == 0, output
    events = [row for row in run.store().events(limit=5000) if row["kind"] == "tracking"]
    assert [row["level"] for row in events] == ["error"] and said in events[0]["text"]
    assert "the run goes on without it" in output and "aglite export --to wandb" in output
    assert [row["step"] for row in run.store().steps()] == [1, 2, 3]
    if pytest.importorskip("tensorboard"):
        curves = tensorboard_curves(run.run_dir.tracking / "tensorboard")
        assert curves["train/reward_mean"] == rewards(run), "the other writer goes on"
    assert run.gone()


async def test_a_writer_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(children, "FINISH_S", 0.5)
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    store, reaper = Store.open(run_dir.db), Reaper(run_dir.path)
    await reaper.start()
    trackers = Trackers(["wandb"], run_dir, store, reaper, dict(os.environ))
    await trackers.start()
    (pid,) = (child.pid for child in trackers._children.values())
    began = time.monotonic()
    await trackers.stop()
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (event,) = store.events()
    assert "was not done 0.5 s after the end, and was ended" in event["text"] and event["level"] == "error"
    await reaper.stop()
    store.close()


async def test_writers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = MiniRun(tmp_path, tracking=["tensorboard"], held_step=1)
    run.start()
    run.until(lambda store: store.phases() and store.phases(1)[0]["phase"] == "training")
    await asyncio.sleep(0)
    assert any("aglite.tracking" in line for line in run.leftovers())
    run.signal(signal.SIGKILL)
    run.wait()
    assert run.gone(), run.leftovers()
