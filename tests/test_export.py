"""What is exported is what was recorded."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest

from aglite.columns import COLUMNS
from aglite.errors import AgliteError
from aglite.export import _groups, export
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
            metrics = {"reward_mean": 1.0, "forks": {"first": 2, "edited": 0}, "note": "text"}
            fates = {name: "trained"}
            await store.add_step(1, 4, "applied", metrics, 0, 1, samples=records, fates=fates, groups=["g-1"])
    number = await store.start_evaluation(1, 4)
    share = {"mean": 0.5, "low": 0.1, "high": 0.9}
    await store.finish_evaluation(number, "done", {"mean": 0.75, "n": 2, "pass@1": share, "by_kind": {"word": 0.75}})
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
            "constrained": [0, 0, 0, 0],
            "calls": [[1, 1]],
            "advantage": 0.5,
            "weight": 0.25,
        }
    ]
    assert export(run_dir, "steps", "jsonl", out) == 1
    (step,) = lines(out)
    assert step["metrics"] == {"reward_mean": 1.0, "forks.first": 2, "forks.edited": 0}
    assert (step["step"], step["version"], step["state"]) == (1, 4, "applied")
    assert export(run_dir, "evaluations", "jsonl", out) == 1
    assert lines(out)[0]["result"] == {
        "mean": 0.75,
        "n": 2,
        "pass@1.mean": 0.5,
        "pass@1.low": 0.1,
        "pass@1.high": 0.9,
        "by_kind.word": 0.75,
    }
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("what", COLUMNS)
def test_the_columns_are_those_that_are_documented(run_dir: RunDir, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out.jsonl"
    export(run_dir, what, "jsonl", out)
    assert all(set(row) == set(COLUMNS[what]) for row in lines(out))


@pytest.mark.parametrize("what", COLUMNS)
def test_parquet_holds_the_same(run_dir: RunDir, tmp_path: Path, what: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    jsonl, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    number = export(run_dir, what, "jsonl", jsonl)
    assert export(run_dir, what, "parquet", table) == number
    rows = parquet.read_table(table).to_pylist()
    for row in rows:
        for name in {"breakdown", "metrics", "result"} & row.keys():
            row[name] = dict(row[name])
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


async def many(folder: Path, number: int) -> RunDir:
    run = RunDir(folder)
    store = Store.open(run.db)
    await asyncio.gather(*(store.add_rollout(f"r-{n}", "t", None, "train", "local") for n in range(number)))
    store.close()
    return run


async def test_a_long_run_takes_no_more_memory(tmp_path: Path) -> None:
    few, long = await many(tmp_path / "few", 1000), await many(tmp_path / "long", 6000)
    peaks = []
    for run, number in ((few, 1000), (few, 1000), (long, 6000)):  # the first warms up
        tracemalloc.start()
        assert export(run, "rollouts", "jsonl", tmp_path / "out.jsonl") == number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1]
    assert [row["id"] for row in lines(tmp_path / "out.jsonl")] == [f"r-{n}" for n in range(6000)]


def test_parquet_is_written_in_parts_of_bounded_size() -> None:
    rows = [{"ids": [0] * size} for size in (400_000, 99_999, 1, 600_000, 2)]
    assert [[len(row["ids"]) for row in group] for group in _groups(iter(rows))] == [
        [400_000, 99_999, 1],
        [600_000],
        [2],
    ]
    assert [len(group) for group in _groups({"id": n} for n in range(1025))] == [512, 512, 1]
