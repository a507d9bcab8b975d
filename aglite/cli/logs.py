"""What agents printed: `aglite logs`, and with `--follow` what they print."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from aglite.cli.where import find_run
from aglite.errors import AgliteError
from aglite.shown import redactor_of
from aglite.stored import StoredRun
from aglite.units import UNFINISHED

POLL_S = 0.2


def logs(directory: Path | None, name: str, attempt: int | None) -> None:
    """Print the log of one attempt. Raises AgliteError if it has none."""
    stored = StoredRun(find_run(directory))
    row = stored.store.rollout(whole_id(stored, name))
    wanted = attempt or row["attempt"]
    file = stored.run_dir.rollout_log(row["id"], wanted)
    if not file.exists():
        raise AgliteError(
            f"rollout {row['id']} has no log of attempt {wanted} (it is {row['state']})",
            f"it has attempts 1 to {row['attempt']}" if row["attempt"] else "its agent has not been started",
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(redactor_of(stored.store).data(file.read_bytes()))


def follow(directory: Path | None, name: str, attempt: int | None) -> None:
    """Print the log and what is added to it until the rollout (or the attempt that was asked for) has ended.

    A later attempt is followed too; that it begins is said on standard error.
    """
    stored = StoredRun(find_run(directory))
    rollout_id = whole_id(stored, name)
    redactor = redactor_of(stored.store)
    for data in _growth(stored, rollout_id, attempt):
        sys.stdout.buffer.write(redactor.data(data))
        sys.stdout.buffer.flush()


def _growth(stored: StoredRun, rollout_id: str, only: int | None) -> Iterator[bytes]:
    """Whole lines as they are written; what is left of the last one when there will be no more."""
    number, position, rest = only or max(1, stored.store.rollout(rollout_id)["attempt"]), 0, b""
    while True:
        row = stored.store.rollout(rollout_id)  # before the file is read: what ended by then is in it
        file = stored.run_dir.rollout_log(rollout_id, number)
        if file.exists():
            with file.open("rb") as log:
                log.seek(position)
                data = log.read()
            position += len(data)
            whole, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                yield whole + newline
        if row["attempt"] > number or row["state"] not in UNFINISHED:
            if rest:
                yield rest
            if only or row["attempt"] <= number:
                return
            number, position, rest = number + 1, 0, b""
            print(f"--- attempt {number} ---", file=sys.stderr, flush=True)
            continue
        time.sleep(POLL_S)


ID_LENGTH = 12
"""Length of a whole rollout id: `r-` and ten hexadecimal digits."""


def whole_id(stored: StoredRun, name: str) -> str:
    """The id that a beginning of it means. Raises AgliteError if it means none or several."""
    if len(name) >= ID_LENGTH:
        return name
    found = [row["id"] for row in stored.rollouts() if row["id"].startswith((name, f"r-{name}"))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise AgliteError(f"no rollout {name} in {stored.run_dir.path}", "`aglite rollouts` lists them")
    raise AgliteError(f"{name} fits {len(found)} rollouts", f"give more of the id: {', '.join(found[:5])} …")
