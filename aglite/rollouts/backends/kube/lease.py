"""How long the cluster lets a Job last: for some minutes, and then for as many more again, while aglite lives.

The Job controller ends a Job that has lasted for `activeDeadlineSeconds`, which may be changed while it runs. So Jobs
whose supervisor was killed end soon, and nothing has to run in a pod for that.
"""

from __future__ import annotations

import time

LEASE_S = 600
"""How long a Job goes on without being renewed: agents live so long at most after their supervisor."""
RENEW_S = 120
"""How often they are renewed. The API server may be away for the rest of the time."""


class Lease:
    """One Job's."""

    def __init__(self, most_s: int) -> None:
        """`most_s`: how long the Job may last in all, however often it is renewed."""
        self.most_s = most_s
        self.lasts_s = min(LEASE_S, most_s)
        """The Job's `activeDeadlineSeconds`, as far as the cluster was told."""
        self._begun = time.monotonic()

    def begin(self) -> None:
        """The Job is not made before now."""
        self._begun = time.monotonic()

    @property
    def renewed_s(self) -> int:
        """What to make of its `activeDeadlineSeconds` now."""
        return max(self.lasts_s, min(int(time.monotonic() - self._begun) + LEASE_S, self.most_s))

    @property
    def ended(self) -> str:
        """Why the cluster ended the Job, if it has done so because of its time; '' before that."""
        if time.monotonic() - self._begun < self.lasts_s:
            return ""
        if self.lasts_s >= self.most_s:
            return f"it lasted longer than agent.kubernetes.deadline_s ({self.most_s} s)"
        return f"its Job could not be renewed for {LEASE_S} s"
