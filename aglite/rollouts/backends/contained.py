"""What agents in containers have in common, whoever runs the containers."""

from __future__ import annotations

import signal
from typing import Protocol

from aglite.rollouts.logfile import LogFile

FOLDER = "/rollout"
"""Where the scratch volume is mounted: `work`, `home` and `task.json` are in it."""
MOST_FILES = 20_000
"""Files, folders and links that are taken out of one rollout's working directory."""
SAID_BYTES = 1 << 16
OUTPUT_END_S = 15.0
"""How long the last output may take to arrive after the end. Usually that is a moment; on a busy machine, seconds."""
LOST_OUTPUT_END_S = 5.0
"""The same where an agent was lost: nobody may be left who would send it."""

_SIGNALS = frozenset(number.value for number in signal.Signals)


def exit_code(status: int) -> int:
    """The exit code for a container's status, -N when signal N ended the agent: as a shell tells it, its init process
    ends with 128 + N then."""
    return 128 - status if status - 128 in _SIGNALS else status


class Said:
    """The last 64 KiB of what an agent printed, or a little more, as it came."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        self._data += data
        if len(self._data) > 2 * SAID_BYTES:
            del self._data[:-SAID_BYTES]

    def __bytes__(self) -> bytes:
        return bytes(self._data)


class Followed(Protocol):
    """An agent's output that is followed into its log."""

    log: LogFile
    said: Said


class Contained:
    """What `Running` tells of an agent's output, of one whose output is followed."""

    _output: Followed

    @property
    def left_out(self) -> int:
        return self._output.log.left_out

    @property
    def said(self) -> bytes:
        return bytes(self._output.said)

    @property
    def last_line(self) -> str:
        return self._output.log.last_line()
