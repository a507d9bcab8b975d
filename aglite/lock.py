"""One aglite a run directory."""

from __future__ import annotations

import fcntl
import json
from typing import IO

from aglite.errors import AgliteError
from aglite.paths import RunDir


def hold(run_dir: RunDir) -> IO[str]:
    """Take the run directory; closing the file gives it back, and so does the end of the process.

    Raises AgliteError that names the holder while another process has it.
    """
    file = run_dir.lock.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise AgliteError(
            f"{run_dir.path} is in use by another aglite{_holder(run_dir)}",
            "watch it with `aglite attach`, end it with `aglite down`, or use another --dir",
        ) from None
    return file


def _holder(run_dir: RunDir) -> str:
    try:
        return f" (pid {json.loads(run_dir.control.read_text())['pid']})"
    except (OSError, ValueError, KeyError):
        return ""
