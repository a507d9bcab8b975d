"""The last minutes as a strip of phases, with the share of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar

from textual.content import Content

from aglite.history import PHASES_S
from aglite.tui.widgets.panel import Panel, faint, lines, row
from aglite.tui.widgets.phase import COLORS

GLYPHS = {
    "rollout": "█",
    "evaluating": "▓",
    "training": "▒",
    "paused": "╍",
    "starting": "·",
    "stopped": " ",
}
"""How each phase is drawn, so that it is told without its colour; the short ones around an update are all alike."""
BETWEEN = "░"


class Timeline(Panel):
    """One line: the strip between its ends. Two: a scale and the shares below."""

    TICKS: ClassVar = True

    def draw(self, width: int, height: int, now: float) -> Content:
        status = self.snapshot.status or {}
        phases = status.get("phases") or []
        if not phases or width < 24:
            return Content("")
        end = now if status.get("pid") and self.snapshot.link in ("live", "lost") else _end(phases, now)
        window = max(min(end - phases[0]["started_at"], PHASES_S), 1.0)
        label = f" {window / 60:.0f} min " if window >= 90 else f" {window:.0f} s "
        room = width - len(label) - 1
        cells = slots(phases, end - window, end, room)
        spans = [(phase, len(list(same))) for phase, same in groupby(cells)]
        strip = Content.assemble(
            (label, "$faint"),
            *[(GLYPHS.get(p, BETWEEN) * n, COLORS.get(p, "")) if p else " " * n for p, n in spans],
            " ",
        )
        return lines(strip, self._shares(cells, len(label), width)) if height > 1 else strip

    def _shares(self, cells: Sequence[str], indent: int, width: int) -> Content:
        known = [phase for phase in cells if phase]
        parts: list[Any] = [" " * indent]
        for phase in sorted(set(known), key=lambda each: -known.count(each)):
            if phase == "stopped":
                continue
            glyph, style = GLYPHS.get(phase, BETWEEN), COLORS.get(phase, "")
            parts += [(glyph, style), (f" {phase} {known.count(phase) / len(known):.0%}   ", "$faint")]
        return row(Content.assemble(*parts).rstrip(), faint("now "), width)


def _end(phases: Sequence[dict[str, Any]], now: float) -> float:
    """When a run that is over ended."""
    last = phases[-1]
    return last["started_at"] if last["phase"] == "stopped" else last["finished_at"] or now


def slots(phases: Sequence[dict[str, Any]], start: float, end: float, number: int) -> list[str]:
    """For each of `number` equal parts of the time from `start` to `end` the phase that took most of it, '' if none."""
    if number < 1 or end <= start:
        return []
    size = (end - start) / number
    taken: list[dict[str, float]] = [{} for _ in range(number)]
    for phase in phases:
        began, ended = max(phase["started_at"], start), min(phase["finished_at"] or end, end)
        if ended <= began:
            continue
        for index in range(int((began - start) / size), min(int((ended - start) / size) + 1, number)):
            left = start + index * size
            share = min(ended, left + size) - max(began, left)
            if share > 0:
                taken[index][phase["phase"]] = taken[index].get(phase["phase"], 0.0) + share
    return [max(slot, key=lambda phase: slot[phase]) if slot else "" for slot in taken]
