"""The circuit breaker: when everything fails by infrastructure, nothing more is launched until a probe works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from aglite.rollouts.causes import Cause
from aglite.rollouts.slots import Slots

log = logging.getLogger("aglite.rollouts")

IN_A_ROW = 5
"""Attempts that failed one after the other, over at least two tasks, open the breaker. A task that cannot be graded is
not everything; but three times as many of a single task are. A grader that has never worked is the recipe's mistake:
waiting does not mend it."""

LONGEST_WAIT_S = 300.0
"""Between two probes, at most; each wait is twice the one before."""

ON_THE_WAY = ("launch", "image", "backend")
"""Causes of an agent that was never started: a probe that starts shows that they are over."""


class Breaker:
    """Watches how attempts end. Open, it hands out one slot now and then: that attempt is the probe.

    While it is open, attempts that fail by infrastructure are no failures of their rollouts: these wait for the end.
    `on_change(open, text)` is told when it opens and closes.
    """

    def __init__(self, slots: Slots, first_wait_s: float, on_change: Callable[[bool, str], None]) -> None:
        self.why = ""
        """The cause that opened it; '' while it is closed."""
        self._slots = slots
        self._first_wait_s = self._wait_s = first_wait_s
        self._on_change = on_change
        self._failed: list[str] = []
        self._worked = False
        self._probe: object = None
        self._since = self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return bool(self.why)

    @property
    def text(self) -> str:
        """What is wrong and what will be done, for people; '' while all is well."""
        if not self.why:
            return ""
        left = self._next - time.monotonic()
        again = f"tried again in {left:.0f} s" if left > 0 and self._probe is None else "trying again"
        return (
            f"launching is paused: the last {len(self._failed)} attempts all failed by infrastructure ({self.why}); "
            f"{again}"
        )

    def begin(self, attempt: object) -> None:
        """An attempt is about to be made. Open, the first one that comes is the probe."""
        if self.is_open and self._probe is None:
            self._probe = attempt

    def started(self, attempt: object) -> None:
        """Its agent runs."""
        if attempt is self._probe and self.why.partition(":")[0] in ON_THE_WAY:
            self._close()

    def ended(self, attempt: object, task_id: str, cause: Cause | None) -> bool:
        """It is over. True if the failure is not to be counted against the rollout."""
        kind = cause.kind if cause else "policy"
        if cause is not None and kind == "infrastructure":
            if cause.code == "recipe" or (cause.code == "grader" and not self._worked):
                if attempt is self._probe:
                    self._close()  # whatever it was waited for is over
                return False
            self._failed.append(task_id)
            count = len(self._failed)
            if not self.is_open and (
                count >= 3 * IN_A_ROW or (count >= IN_A_ROW and len(set(self._failed[-IN_A_ROW:])) > 1)
            ):
                self._open(cause)
            elif attempt is self._probe:
                self.why = str(cause)
                self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
                self._wait()
            return self.is_open
        if attempt is self._probe:
            self._wait() if kind == "cancelled" else self._close()
        elif kind == "policy" and not self.is_open:
            self._failed.clear()
        self._worked |= kind == "policy"
        return False

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _open(self, cause: Cause) -> None:
        self.why = str(cause)
        self._since = time.monotonic()
        self._wait_s = self._first_wait_s
        self._wait()
        log.warning("%s", self.text)
        self._on_change(True, self.text)

    def _close(self) -> None:
        self.why, self._probe = "", None
        self._failed.clear()
        self.stop()
        self._slots.only(None)
        self._on_change(False, f"launching goes on, after {time.monotonic() - self._since:.0f} s")

    def _wait(self) -> None:
        self._probe = None
        self.stop()
        self._slots.only(0)
        self._next = time.monotonic() + self._wait_s
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._slots.only, 1)
