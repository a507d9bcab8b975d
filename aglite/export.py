"""`aglite export`: what a run recorded, as JSON lines or Parquet, for other people's tools."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from aglite.columns import COLUMNS, Kind
from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.redact import Redactor
from aglite.shown import is_masked, redactor_of, shown, shown_result
from aglite.store import Store
from aglite.store.old import readable

if TYPE_CHECKING:
    from aglite.tracking.points import Tracker

FORMATS = ("jsonl", "parquet")
TRACKERS = ("tensorboard", "wandb", "trackio")
ROWS_PER_GROUP = 512
NUMBERS_PER_GROUP = 500_000
"""How much of a Parquet file is held in memory: a row of a long conversation has hundreds of thousands of numbers."""

Row = dict[str, Any]

TOKENS = {"samples": ("input_ids",), "calls": ("prompt_ids", "response_ids")}
"""Columns from which the text can be had back."""


def export(run_dir: RunDir, what: str, form: str, out: Path, *, tokens: bool | None = None) -> int:
    """Write all rows of `what` (a key of COLUMNS) of a run to `out` (`-`: standard output); returns how many.

    Rollouts come in the order they were made, calls (of each rollout's last attempt) and samples rollout by rollout;
    samples of steps that were rolled back are left out. The file is written beside `out` and renamed when whole. Rows
    are read and written a few at a time, so that the memory it takes does not depend on how long the run was.

    Where the run's text is masked, every row says `"redacted": true`, and `tokens` has to say whether token ids, from
    which the text could be had back, go along; elsewhere they do by default.
    Raises AgliteError: no such run, no place to write, Parquet without pyarrow, or a masked run without `tokens`.
    """
    try:
        with readable(run_dir.db) as store:
            masked = is_masked(store)
            if tokens is None and masked and what in TOKENS:
                raise AgliteError(
                    f"the text of {run_dir.path} is masked, and token ids can be turned back into text",
                    "say --no-tokens to leave them out, or --tokens to export them all the same",
                )
            left_out = TOKENS.get(what, ()) if tokens is False else ()
            schema = _schema(what, masked, left_out) if form == "parquet" else None
            with _target(out) as file:
                rows = _as_shown(READERS[what](store), redactor_of(store), masked, left_out)
                return _write_parquet(rows, schema, file) if schema is not None else _write_lines(rows, file)
    except BrokenPipeError:
        raise  # whoever reads standard output has seen enough
    except OSError as error:
        raise AgliteError(f"{out} could not be written: {error.strerror or error}", "choose another --out") from error


def track(run_dir: RunDir, tracker: Tracker, folder: Path) -> int:
    """Write all steps and evaluations of a run for a tracker, as one that followed it would have; returns how many.

    trackio keeps its files in `folder`, too, unless TRACKIO_DIR says where. Raises AgliteError where the library is not
    installed.
    """
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    from aglite.tracking.follow import write_all

    with readable(run_dir.db) as store:
        return write_all(store, tracker, folder)


def _calls(store: Store) -> Iterator[Row]:
    for rollout in store.each_rollout():
        for call in store.calls(rollout["id"]):
            yield {"rollout_id": rollout["id"], **call.json()}


def _samples(store: Store) -> Iterator[Row]:
    for rollout in store.each_rollout():
        if rollout["samples"]:
            for sample in store.samples(rollout_id=rollout["id"]):
                yield {"rollout_id": rollout["id"], "step": sample.step, **sample.json()}


def _steps(store: Store) -> Iterator[Row]:
    for row in store.steps():
        yield {**row, "metrics": flat(row["metrics"])}


def _evaluations(store: Store) -> Iterator[Row]:
    redactor = redactor_of(store)
    for row in store.evaluations():
        yield {**row, "result": flat(shown_result(row["result"], redactor))}


def flat(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a JSON object by name, those of objects in it as `outer.inner`; what is no number is left out."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


READERS: dict[str, Callable[[Store], Iterator[Row]]] = {
    "samples": _samples,
    "calls": _calls,
    "rollouts": lambda store: store.each_rollout(),
    "steps": _steps,
    "evaluations": _evaluations,
}


def _as_shown(rows: Iterator[Row], redactor: Redactor, masked: bool, left_out: tuple[str, ...]) -> Iterator[Row]:
    for row in rows:
        for name in left_out:
            del row[name]
        yield {**shown(row, redactor), "redacted": True} if masked else row


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
        for group in _groups(rows):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            number += len(group)
    return number


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in groups that are not too large for the memory."""
    group: list[Row] = []
    numbers = 0
    for row in rows:
        group.append(row)
        numbers += sum(len(value) for value in row.values() if isinstance(value, list))
        if len(group) == ROWS_PER_GROUP or numbers >= NUMBERS_PER_GROUP:
            yield group
            group, numbers = [], 0
    if group:
        yield group


def _schema(what: str, masked: bool, left_out: tuple[str, ...]) -> Any:
    """The Parquet columns; fixed, so that an empty export and a full one have the same types."""
    try:
        import pyarrow as pa
    except ImportError:
        raise AgliteError(
            "Parquet needs the package pyarrow, which is not installed",
            "`pip install pyarrow`, or use --format jsonl",
        ) from None
    types: dict[Kind, Any] = {
        "text": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "boolean": pa.bool_(),
        "integers": pa.list_(pa.int32()),
        "numbers": pa.list_(pa.float32()),
        "texts": pa.list_(pa.string()),
        "pairs": pa.list_(pa.list_(pa.int64())),
        "numbers by name": pa.map_(pa.string(), pa.float64()),
    }
    wanted = {name: types[kind] for name, (kind, _) in COLUMNS[what].items() if name not in left_out}
    return pa.schema(list((wanted | ({"redacted": pa.bool_()} if masked else {})).items()))


@contextlib.contextmanager
def _target(out: Path) -> Iterator[BinaryIO]:
    """The file to write; `-` is standard output."""
    if str(out) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with whole_file(out) as file:
        yield file


@contextlib.contextmanager
def whole_file(out: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the name `out` only if all went well."""
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
