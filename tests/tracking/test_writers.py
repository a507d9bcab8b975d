"""The real libraries, each in its own process as a run starts it, and read back with their own means."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracked import evaluation, roll_back, step

from aglite.export import track
from aglite.paths import RunDir
from aglite.store import Store
from aglite.tracking.points import about

Curves = dict[str, list[tuple[int, float]]]


def follow(tracker: str, run_dir: RunDir, **env: str) -> subprocess.CompletedProcess[str]:
    """Write what there is, as a writer does whose supervisor ends at once."""
    command = [sys.executable, "-m", "aglite.tracking", tracker, str(run_dir.path)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env={**own, **env}
    )


def tensorboard_curves(folder: Path) -> Curves:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder), {"scalars": 0}
    )
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: a header, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_run(folder: Path) -> tuple[Any, Curves]:
    """The only run under a folder, and its history over our steps."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run, curves = None, {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if "/" in name:
                    curves.setdefault(name, []).append((row["step"], value))
            assert (row["_timestamp"] >= 1000 and "train/reward_mean" in row) or "validation/mean" in row
    return run, curves


def trackio_curves(folder: Path, project: str = "aglite") -> dict[str, Curves]:
    rows = sqlite3.connect(folder / f"{project}.db").execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
    found: dict[str, Curves] = {}
    for run, number, metrics in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault(run, {}).setdefault(name, []).append((number, value))
    return found


def test_tensorboard(store: Store, run_dir: RunDir) -> None:
    pytest.importorskip("tensorboard")
    folder = run_dir.tracking / "tensorboard"
    evaluation(store, 0, 0.25)
    step(store, 1, 0.5, grad_norm=math.nan)
    step(store, 2, 0.625)
    assert follow("tensorboard", run_dir).returncode == 0
    curves = tensorboard_curves(folder)
    assert curves["train/reward_mean"] == [(1, 0.5), (2, 0.625)]
    assert curves["validation/mean"] == [(0, 0.25)] and curves["validation/by_kind.word"] == [(0, 0.25)]
    assert math.isnan(curves["train/grad_norm"][0][1])
    roll_back(store, 1)
    step(store, 2, 0.75)
    step(store, 3, 0.875)
    assert follow("tensorboard", run_dir).returncode == 0
    assert tensorboard_curves(folder)["train/reward_mean"] == [(1, 0.5), (2, 0.75), (3, 0.875)]
    assert tensorboard_curves(folder)["validation/mean"] == [(0, 0.25)]


def test_a_tensorboard_that_is_open_forgets_what_was_taken_back(store: Store, run_dir: RunDir) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    step(store, 1, 0.5)
    step(store, 2, 0.625)
    assert follow("tensorboard", run_dir).returncode == 0
    reader = accumulator.EventAccumulator(str(run_dir.tracking / "tensorboard"))
    reader.Reload()
    roll_back(store, 1)
    step(store, 2, 0.75)
    assert follow("tensorboard", run_dir).returncode == 0
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("train/reward_mean")] == [(1, 0.5), (2, 0.75)]
    assert reader.Scalars("train/reward_mean")[1].wall_time == 2000.0


def test_wandb_offline(store: Store, run_dir: RunDir) -> None:
    pytest.importorskip("wandb")
    folder = run_dir.tracking / "wandb"
    evaluation(store, 0, 0.25)
    step(store, 1, 0.5)
    step(store, 2, 0.625)
    done = follow("wandb", run_dir)
    assert done.returncode == 0, done.stderr
    run, curves = wandb_run(folder)
    assert (run.run_id, run.display_name, run.project) == (about(store).id, "words", "aglite")
    assert curves["train/reward_mean"] == [(1, 0.5), (2, 0.625)] and curves["validation/mean"] == [(0, 0.25)]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["trainer.lr"] == 0.5
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert b"very-secret" not in file.read_bytes() and run.host == "" and run.git.commit == ""
    roll_back(store, 1)
    step(store, 2, 0.75)
    step(store, 3, 0.875)
    assert follow("wandb", run_dir).returncode == 0
    again, curves = wandb_run(folder)
    assert again.run_id == run.run_id, "the same run, gone on with"
    assert curves["train/reward_mean"] == [(1, 0.5), (2, 0.75), (3, 0.875)]


def test_trackio(store: Store, run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    evaluation(store, 0, 0.25)
    step(store, 1, 0.5)
    done = follow("trackio", run_dir, **env)
    assert done.returncode == 0, done.stderr
    step(store, 2, 0.625)
    assert follow("trackio", run_dir, **env).returncode == 0
    (curves,) = trackio_curves(tmp_path / "trackio").values()
    assert curves["train/reward_mean"] == [(1, 0.5), (2, 0.625)] and curves["validation/mean"] == [(0, 0.25)]
    roll_back(store, 1)
    step(store, 2, 0.75)
    assert follow("trackio", run_dir, **env).returncode == 0
    found = trackio_curves(tmp_path / "trackio")
    assert list(found) == [about(store).id]
    assert found[about(store).id]["train/reward_mean"] == [(1, 0.5), (2, 0.75)]


def test_trackio_that_cannot_write_is_noticed(store: Store, run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (tmp_path / "trackio").write_text("a file where a folder should be")
    step(store, 1, 0.5)
    done = follow("trackio", run_dir, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode != 0 and done.stderr.strip()


def test_export_afterwards_is_the_same(store: Store, run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    evaluation(store, 0, 0.25)
    step(store, 1, 0.5)
    step(store, 2, 0.625)
    roll_back(store, 1)
    assert track(run_dir, "tensorboard", tmp_path / "out") == 2
    assert follow("tensorboard", run_dir).returncode == 0
    assert tensorboard_curves(tmp_path / "out") == tensorboard_curves(run_dir.tracking / "tensorboard")


def test_a_library_that_is_not_there_is_named(store: Store, run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'wandb' else find(name, *rest)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = follow("wandb", run_dir, PYTHONPATH=path)
    assert done.returncode == 1 and "tracking: wandb is not installed" in done.stderr
    assert "pip install wandb" in done.stderr and "Traceback" not in done.stderr
