"""The command palette: the table of keys, by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode

from aglite.tui.keys import HELP, Key

MOVES = ("cursor", "page", "edge", "scroll_page", "turn", "command_palette")
"""Actions that only make sense as keys."""


class KeyCommands(Provider):
    """What can be done where the palette was opened."""

    async def discover(self) -> Hits:
        for key, node, action in self._possible():
            yield DiscoveryHit(
                f"{key.long}  ({key.written})", partial(self.app.run_action, action, node), text=key.long
            )

    async def search(self, query: str) -> Hits:
        match = self.matcher(query)
        for key, node, action in self._possible():
            score = match.match(key.long)
            if score > 0:
                yield Hit(
                    score,
                    match.highlight(f"{key.long}  ({key.written})"),
                    partial(self.app.run_action, action, node),
                    text=key.long,
                )

    def _possible(self) -> Iterator[tuple[Key, DOMNode, str]]:
        active = {each.binding.action: each for each in self.screen.active_bindings.values() if each.enabled}
        for _, table in HELP:
            for key in table:
                found = active.get(key.action)
                if found is not None and key.action.partition("(")[0] not in MOVES:
                    yield key, found.node, key.action
