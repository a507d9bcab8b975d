"""Task rows: read from a `.jsonl` file, or yielded by a function of the recipe's own.

A row is `{"id": str, "public": {...}, "hidden": {...}}`: the agent sees `public` only, the grader both.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from aglite.errors import RecipeError
from aglite.units import encodable

MAX_ROWS = 1_000_000
TIMEOUT_S = 300

FORM = 'a row is {"id": "...", "public": {...}, "hidden": {...}}'


def load_tasks(source: str, folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of `source`, a name in the recipe's `folder`, in their order. Raises RecipeError.

    A function runs in a child process: what it imports and prints stays out of this one, and sets have the same order
    each time (PYTHONHASHSEED=0).
    """
    where = f"tasks.{split}: {source}"
    if source.endswith(".jsonl"):
        rows = _read_jsonl(folder / source, where)
        places = [f"line {number}" for number, _ in rows]
        tasks = [row for _, row in rows]
    else:
        tasks = _call(source, folder, where)
        places = [f"row {number}" for number in range(1, len(tasks) + 1)]
    if not tasks:
        raise RecipeError(f"{where} has no rows", FORM)
    seen: dict[str, str] = {}
    checked = []
    for place, row in zip(places, tasks, strict=True):
        problem = problem_of(row)
        if problem:
            raise RecipeError(f"{where}, {place}: {problem}", FORM)
        if row["id"] in seen:
            raise RecipeError(f"{where}, {place}: id {row['id']!r} was used by {seen[row['id']]}", "make ids unique")
        seen[row["id"]] = place
        checked.append({"id": row["id"], "public": row["public"], "hidden": row.get("hidden", {})})
    return checked


def tasks_hash(*splits: list[dict[str, Any]]) -> str:
    """A checksum of task rows (key order aside), for the manifest and to notice on resume that they changed."""
    text = json.dumps(splits, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def problem_of(row: Any) -> str | None:
    """What is wrong with one row, or None."""
    if not isinstance(row, dict):
        return f"a row must be a mapping, this is {type(row).__name__}"
    unknown = sorted(set(row) - {"id", "public", "hidden"})
    if unknown:
        return f"unknown key {unknown[0]!r}; what the agent may see belongs into `public`"
    if not isinstance(row.get("id"), str) or not row["id"]:
        return f"`id` must be a non-empty string, it is {row.get('id')!r}"
    if encodable(row["id"]) != row["id"]:
        return f"`id` {row['id']!r} has half a character"
    if not isinstance(row.get("public"), dict):
        return "`public` is missing or no mapping"
    if not isinstance(row.get("hidden", {}), dict):
        return "`hidden` is no mapping"
    return None


def _read_jsonl(file: Path, where: str) -> list[tuple[int, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{where} cannot be read: {error}", "the path is relative to the recipe's folder") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line, parse_constant=_refuse_constant)))
            except ValueError as error:
                raise RecipeError(f"{where}, line {number}: not valid JSON ({error})", "one JSON row a line") from None
    return rows


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _call(source: str, folder: Path, where: str) -> list[Any]:
    file, colon, function = source.partition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise RecipeError(f"{where} is neither a .jsonl file nor file.py:function", "for example tasks.py:train")
    if not (folder / file).is_file():
        raise RecipeError(f"{where}: no file {file} in {folder}", "the path is relative to the recipe's folder")
    with tempfile.TemporaryDirectory(prefix="aglite-tasks-") as text:
        out = Path(text) / "rows.jsonl"
        command = [sys.executable, "-m", "aglite.tasks", str((folder / file).resolve()), function, str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise RecipeError(
                f"{where} did not finish in {TIMEOUT_S} s", "yield fewer rows, or write a .jsonl"
            ) from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
            place = f" ({places[-1]})" if places else ""
            raise RecipeError(f"{where} failed: {lines[-1]}{place}", f"try: python {folder / file}")
        return [row for _, row in _read_jsonl(out, where)]


def _write_rows(file: Path, function: str, out: Path) -> None:
    """The child's side: call the function and write its rows."""
    import runpy

    sys.path.insert(0, str(file.parent))
    try:
        maker = runpy.run_path(str(file), run_name="aglite_tasks")[function]
    except KeyError:
        raise SystemExit(f"{file.name} has no function {function}") from None
    with out.open("w", encoding="utf-8") as stream:
        for number, row in enumerate(maker(), 1):
            if number > MAX_ROWS:
                raise SystemExit(f"{function} yields more than {MAX_ROWS} rows")
            try:
                stream.write(json.dumps(row, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise SystemExit(f"row {number} is no JSON: {error}") from None


if __name__ == "__main__":
    _write_rows(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
