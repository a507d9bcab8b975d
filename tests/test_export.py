"""What is exported is what was recorded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from aglite.errors import AgliteError
from aglite.export import export
from aglite.paths import RunDir
from aglite.store import CallRecord, SampleRecord, Store


@pytest.fixture
async def run_dir(tmp_path: Path) -> RunDir:
    """Two rollouts, one of them trained."""
    run = RunDir(tmp_path / "run")
    store = Store.open(run.db)
    await store.add_group("g-1", "t", "train", 2)
    for name, tokens in (("r-a", [5, 6]), ("r-b", [7])):
        await store.add_rollout(name, "t", "g-1", "train", "local")
        await store.set_rollout_state(name, "running", attempt=1)
        call = await store.add_call(
            CallRecord(name, 1, [1, 2], 2, tokens, [-0.25] * len(tokens), [[3, len(tokens)]], "chat", "ok", 1.0, 2.0)
        )
        await store.set_rollout_state(name, "done", reward=1.0, breakdown={"format": 0.5}, flags=["x"])
        if name == "r-a":
            records = [SampleRecord(name, [(call, True)], 4, 2, 0.5, 0.25)]
            await store.add_step(1, 4, "applied", {}, 0, 1, samples=records, fates={name: "trained"}, groups=["g-1"])
    store.close()
    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines(run_dir: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert export(run_dir, "rollouts", "jsonl", out) == 2
    store = Store.open(run_dir.db, readonly=True)
    assert lines(out) == list(reversed(store.rollouts()))
    assert export(run_dir, "calls", "jsonl", out) == 2
    assert lines(out)[0] == {"rollout_id": "r-a", **store.calls("r-a")[0].json()}
    assert export(run_dir, "samples", "jsonl", out) == 1
    store.close()
    assert lines(out) == [
        {
            "rollout_id": "r-a",
            "step": 1,
            "input_ids": [1, 2, 5, 6],
            "loss_mask": [0, 0, 1, 1],
            "logprobs": [0.0, 0.0, -0.25, -0.25],
            "versions": [-1, -1, 3, 3],
            "calls": [[1, 1]],
            "advantage": 0.5,
            "weight": 0.25,
        }
    ]
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("what", ["samples", "calls", "rollouts"])
def test_parquet_holds_the_same(run_dir: RunDir, tmp_path: Path, what: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    jsonl, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    number = export(run_dir, what, "jsonl", jsonl)
    assert export(run_dir, what, "parquet", table) == number
    rows = parquet.read_table(table).to_pylist()
    for row in rows:
        if "breakdown" in row:
            row["breakdown"] = dict(row["breakdown"])
    assert rows == lines(jsonl)


def test_an_empty_run_exports_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    Store.open(run.db).close()
    assert export(run, "samples", "jsonl", tmp_path / "none.jsonl") == 0
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_standard_output(run_dir: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    export(run_dir, "rollouts", "jsonl", Path("-"))
    assert [json.loads(line)["id"] for line in capfdbinary.readouterr().out.splitlines()] == ["r-a", "r-b"]


def test_faults_are_named(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgliteError, match=r"nowhere/out\.jsonl could not be written: No such file"):
        export(run_dir, "samples", "jsonl", tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(AgliteError, match="no database"):
        export(RunDir(tmp_path / "other"), "samples", "jsonl", tmp_path / "out.jsonl")
    kept = tmp_path / "out.parquet"
    kept.write_text("earlier")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AgliteError, match="pyarrow") as refusal:
        export(run_dir, "samples", "parquet", kept)
    assert "pip install pyarrow" in refusal.value.mend and kept.read_text() == "earlier"


def test_a_reader_that_has_seen_enough_is_no_fault(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        with pytest.raises(BrokenPipeError):
            export(run_dir, "rollouts", "jsonl", Path("-"))
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # so that closing has somewhere to write to
