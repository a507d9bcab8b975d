"""The engine: how fast it samples, what it is busy with, how full its KV cache is."""

from __future__ import annotations

from collections import deque

from textual.content import Content

from aglite import units
from aglite.tui.feed import Snapshot
from aglite.tui.widgets.panel import Panel, faint, gauge, lines, row

HISTORY = 240


class EngineLoad(Panel):
    BORDER_TITLE = "engine"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rates: deque[float] = deque(maxlen=HISTORY)

    def show(self, snapshot: Snapshot) -> None:
        engine = (snapshot.status or {}).get("engine")
        if engine and snapshot.link == "live":
            self._rates.append(engine.get("tokens_per_s") or 0.0)
        super().show(snapshot)

    def draw(self, width: int, height: int, now: float) -> Content:
        engine = (self.snapshot.status or {}).get("engine")
        if not engine:
            return faint(" engine not running")
        rate = Content.assemble((f" {engine.get('tokens_per_s') or 0:.0f}", "bold"), (" tok/s", "$faint"))
        busy = Content.assemble(
            (str(engine.get("running", 0)), "bold"),
            (" running  ", "$faint"),
            (str(engine.get("waiting", 0)), "bold" if engine.get("waiting") else "$faint"),
            (" waiting", "$faint"),
        )
        held = ((self.snapshot.status or {}).get("gate") or {}).get("held", 0)
        if held:
            busy = Content.assemble(busy, "  ", (str(held), "bold $warning"), (" held", "$faint"))
        capacity = engine.get("kv_capacity")
        share = engine["kv_tokens"] / capacity if capacity else None
        if height < 3:
            cache = Content.assemble(("  KV ", "$faint"), f"{share:.0%}") if share is not None else Content("")
            return Content.assemble(rate, "  ", busy, cache).truncate(width, ellipsis=True)
        room = max(width - rate.cell_length - busy.cell_length - 4, 0)
        curve = Content.styled(units.sparkline(list(self._rates), room, floor=0.0), "$primary")
        rows = [row(Content.assemble(rate, "  ", curve), Content.assemble(busy, " "), width)]
        if share is not None:
            numbers = faint(f"{units.count(engine['kv_tokens'])} of {units.count(capacity)} tokens ")
            bar = gauge(share, max(min(width - 36, 40), 5), "$primary")
            rows.append(row(Content.assemble((" KV  ", "$faint"), bar, f" {share:>4.0%}"), numbers, width))
        if engine.get("sampled_tokens"):
            computed, reused = engine.get("prefill_tokens") or 0, engine.get("reused_tokens") or 0
            facts = f" {units.count(engine['sampled_tokens'])} sampled · {units.count(computed)} prefilled"
            if computed + reused:
                facts += f" · {reused / (computed + reused):.0%} cached"
            rows.append(faint(facts).truncate(width, ellipsis=True))
        return lines(*rows[:height])
