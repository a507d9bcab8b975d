"""A line to type in."""

from __future__ import annotations

from textual import events
from textual.widgets import Input


class Line(Input):
    """An Input whose keys act in the order they are typed in.

    Textual's own takes a character at once, but runs what a key is bound to only after the key has gone all the way up
    to the app. Of a backspace and a digit that arrive together, as they do over SSH, the digit came first and was
    deleted again.
    """

    async def on_key(self, event: events.Key) -> None:
        bound = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if bound is not None and bound.node is self and await self.app.run_action(bound.binding.action, self):
            event.stop()
            event.prevent_default()
