"""The keys that can be pressed now, as many as fit in a line; a click presses one."""

from __future__ import annotations

from textual import events
from textual.content import Content

from aglite.tui.widgets.panel import Panel

LAST = ("find", "command_palette", "show_help", "quit")
"""These are shown whatever else there is, in this order, at the end."""


class KeyBar(Panel):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ends: list[tuple[int, str]] = []

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.tick())

    def draw(self, width: int, height: int, now: float) -> Content:
        keys = self._keys()
        last = [item for name in LAST for item in keys if item[0].partition("(")[0].removeprefix("app.") == name]
        first = [item for item in keys if item not in last]
        room = width - sum(self._columns(item) for item in last)
        shown = []
        for item in first:
            room -= self._columns(item)
            if room < 0:
                break
            shown.append(item)
        text = Content("")
        self._ends = []
        for _, key, name, pressed in [*shown, *last]:
            text = Content.assemble(text, " ", (key, "bold $primary"), (f" {name} ", "$faint"))
            self._ends.append((text.cell_length, pressed))
        return text.truncate(width)

    def _keys(self) -> list[tuple[str, str, str, str]]:
        """(action, key as written, word, key to press), those of what has the focus first; hidden ones left out."""
        found: dict[str, tuple[str, str, str, str]] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.show and active.enabled and binding.description:
                written = binding.key_display or binding.key
                found.setdefault(binding.action, (binding.action, written, binding.description, binding.key))
        return list(found.values())

    @staticmethod
    def _columns(item: tuple[str, str, str, str]) -> int:
        return len(item[1]) + len(item[2]) + 3

    def on_click(self, event: events.Click) -> None:
        for end, key in self._ends:
            if event.x < end:
                self.app.simulate_key(key)
                return
