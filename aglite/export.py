"""`aglite export`: samples, calls or rollouts of a run as JSON lines or Parquet, for other people's tools."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.store import Store

WHAT = ("samples", "calls", "rollouts")
FORMATS = ("jsonl", "parquet")
ROWS_PER_GROUP = 256

Row = dict[str, Any]


def export(run_dir: RunDir, what: str, form: str, out: Path) -> int:
    """Write all samples, calls or rollouts of a run to `out` (`-`: standard output); returns how many.

    Rollouts come in the order they were made, calls (of each rollout's last attempt) and samples rollout by rollout.
    Each row is the JSON of the design, a call with its `rollout_id` and a sample with `rollout_id` and `step` besides;
    samples of steps that were rolled back are left out. The file is written beside `out` and renamed when whole.
    Raises AgliteError: no such run, no place to write, or Parquet without pyarrow.
    """
    schema = _schema(what) if form == "parquet" else None
    store = Store.open(run_dir.db, readonly=True)
    try:
        with _target(out) as file:
            rows = READERS[what](store)
            return _write_parquet(rows, schema, file) if schema is not None else _write_lines(rows, file)
    except BrokenPipeError:
        raise  # whoever reads standard output has seen enough
    except OSError as error:
        raise AgliteError(f"{out} could not be written: {error.strerror or error}", "choose another --out") from error
    finally:
        store.close()


def _rollouts(store: Store) -> Iterator[Row]:
    yield from reversed(store.rollouts())


def _calls(store: Store) -> Iterator[Row]:
    for rollout in _rollouts(store):
        for call in store.calls(rollout["id"]):
            yield {"rollout_id": rollout["id"], **call.json()}


def _samples(store: Store) -> Iterator[Row]:
    for rollout in _rollouts(store):
        if rollout["samples"]:
            for sample in store.samples(rollout_id=rollout["id"]):
                yield {"rollout_id": rollout["id"], "step": sample.step, **sample.json()}


READERS: dict[str, Callable[[Store], Iterator[Row]]] = {"rollouts": _rollouts, "calls": _calls, "samples": _samples}


def _write_lines(rows: Iterable[Row], file: BinaryIO) -> int:
    number = 0
    for number, row in enumerate(rows, 1):  # noqa: B007 - the last number is the count
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return number


def _write_parquet(rows: Iterator[Row], schema: Any, file: BinaryIO) -> int:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            number += len(group)
    return number


def _schema(what: str) -> Any:
    """The Parquet columns; fixed, so that an empty export and a full one have the same types."""
    try:
        import pyarrow as pa
    except ImportError:
        raise AgliteError(
            "Parquet needs the package pyarrow, which is not installed",
            "`pip install pyarrow`, or use --format jsonl",
        ) from None
    ids, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    text, integer, number = pa.string(), pa.int64(), pa.float64()
    columns = {
        "rollouts": {
            "id": text,
            "task_id": text,
            "group": text,
            "split": text,
            "state": text,
            "cause": text,
            "attempt": integer,
            "backend": text,
            "calls": integer,
            "samples": integer,
            "prompt_tokens": integer,
            "sampled_tokens": integer,
            "trained_tokens": integer,
            "policy_version_min": integer,
            "policy_version_max": integer,
            "reward": number,
            "breakdown": pa.map_(text, number),
            "flags": pa.list_(text),
            "created_at": number,
            "started_at": number,
            "finished_at": number,
        },
        "calls": {
            "rollout_id": text,
            "id": integer,
            "parent_id": integer,
            "fork_cause": text,
            "dialect": text,
            "prompt_ids": ids,
            "response_ids": ids,
            "logprobs": floats,
            "versions": pa.list_(pa.list_(pa.int32())),
            "finish_reason": text,
            "status": text,
            "started_at": number,
            "first_token_at": number,
            "finished_at": number,
        },
        "samples": {
            "rollout_id": text,
            "step": integer,
            "input_ids": ids,
            "loss_mask": pa.list_(pa.int8()),
            "logprobs": floats,
            "versions": ids,
            "calls": pa.list_(pa.list_(integer)),
            "advantage": number,
            "weight": number,
        },
    }
    return pa.schema(list(columns[what].items()))


@contextlib.contextmanager
def _target(out: Path) -> Iterator[BinaryIO]:
    """The file to write, which takes the name `out` only if all went well."""
    if str(out) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
