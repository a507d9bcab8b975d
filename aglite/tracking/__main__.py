"""`python -m aglite.tracking TRACKER RUN_DIR`: follow a run until standard input is closed, which its supervisor does
when the run ends, or dies doing."""

from __future__ import annotations

import select
import sys
from pathlib import Path

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.tracking.follow import follow

POLL_S = 2.0


def ended() -> bool:
    """Wait for the end, but no longer than until it is time to look at the database again."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and not sys.stdin.buffer.raw.read(64)


def main(tracker: str, folder: str) -> int:
    try:
        follow(RunDir(Path(folder)), tracker, ended)
    except AgliteError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
