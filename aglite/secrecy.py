"""Keeping what this process holds, such as keys in its environment, from other programs of the same user."""

from __future__ import annotations

import ctypes

PR_SET_DUMPABLE = 4


def hide_process() -> None:
    """From now on no other program of this user can look into this process: not at its environment, memory or open
    files in /proc, nor as a debugger. Root still can. Programs that it starts are not hidden."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
