"""The top line: which run, which model, and whether we hear from it."""

from __future__ import annotations

from typing import ClassVar

from textual.content import Content

from aglite import units
from aglite.tui.widgets.panel import Panel, row

LINKS = {
    "connecting": ("○ connecting", "$faint"),
    "live": ("● live", "$success"),
    "lost": ("◌ no answer", "$warning"),
    "died": ("✗ died", "$error"),
    "ended": ("■ not running", "$faint"),
}


class RunHeader(Panel):
    TICKS: ClassVar = True

    def draw(self, width: int, height: int, now: float) -> Content:
        status = self.snapshot.status or {}
        text, style = LINKS[self.snapshot.link]
        if self.snapshot.link == "ended" and status.get("steps") and status["step"] >= status["steps"]:
            text, style = "✓ finished", "$success"
        if self.snapshot.link == "lost" and self.snapshot.heard_at:
            text = f"{text} for {units.clock(now - self.snapshot.heard_at)}"
        left = [(" aglite ", "bold $primary"), ("│ ", "$line"), (status.get("run", ""), "bold")]
        model = status.get("model") or ""
        if model.startswith(("/", ".", "~")):  # a folder: its name says enough
            model = model.rstrip("/").rpartition("/")[2]
        facts = [fact for fact in (model, status.get("mode")) if fact]
        if width >= 60 and facts:
            left.append(("   " + " · ".join(facts), "$faint"))
        right = [(text + " ", style)]
        if self.app.readonly:  # type: ignore[attr-defined]
            right.insert(0, ("only looking  ", "$faint"))
        if width >= 140 and status.get("dir"):
            right.insert(0, (f"{status['dir']}   ", "$faint"))
        return row(Content.assemble(*left), Content.assemble(*right), width)
