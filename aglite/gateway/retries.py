"""Telling a retry from one more request for the same: best-of-n asks several times on purpose."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aglite.gateway.exchange import Exchange

KEPT = 16
"""Last exchanges of a session in which a retry is looked for."""


class Retries:
    """The last exchanges of a session, each with the digest of its request."""

    def __init__(self) -> None:
        self._kept: deque[tuple[bytes, Exchange]] = deque(maxlen=KEPT)

    def __iter__(self):
        return (exchange for _, exchange in self._kept)

    def add(self, digest: bytes, exchange: Exchange) -> None:
        self._kept.append((digest, exchange))

    def clear(self) -> None:
        self._kept.clear()

    def forget(self, exchange: Exchange) -> None:
        """It has no reply to give and was tried again."""
        self._kept = deque((one for one in self._kept if one[1] is not exchange), maxlen=KEPT)

    def find(self, digest: bytes, declared: bool) -> Exchange | None:
        """The earlier exchange that a request is a retry of, if it has or may yet have a reply; None: sample anew.

        A request is a retry if an equal one's connection closed before its reply was delivered, or if the client says
        so (`declared`). Of several such, one that no other retry waits for. A client that says so after an error is
        trying that one again, not another of the same that goes well.
        """
        same = [exchange for known, exchange in self._kept if known == digest]
        if not same:
            return None
        failed = [exchange for exchange in same if exchange.done.done() and exchange.outcome is None]
        able = [exchange for exchange in same if exchange not in failed]
        lost = [exchange for exchange in able if exchange.connection.gone and not exchange.delivered]
        if lost:
            return min(lost, key=lambda exchange: exchange.joiners)
        tried = [exchange for exchange in failed if declared or exchange.connection.gone]
        if tried:
            self.forget(tried[0])
        if tried or not declared or not able:
            return None
        running = [exchange for exchange in able if not exchange.done.done()]
        return min(running, key=lambda exchange: exchange.joiners) if running else able[-1]
