"""What the run is doing: phase and its timer, steps, policy version, gate; below, what it is busy with."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.content import Content

from aglite import units
from aglite.tui.widgets.panel import Panel, faint, lines, row

COLORS = {
    "rollout": "$primary",
    "evaluating": "$success",
    "training": "$accent",
    "draining": "$secondary",
    "sleeping": "$secondary",
    "syncing": "$secondary",
    "paused": "$warning",
    "starting": "$faint",
    "stopped": "$faint",
}
"""Of each phase, here and in the timeline."""


class PhaseBar(Panel):
    TICKS: ClassVar = True

    def draw(self, width: int, height: int, now: float) -> Content:
        status = self.snapshot.status
        if status is None:
            return faint(" waiting for the first answer …" if self.snapshot.link == "connecting" else "")
        first = self._first(status, width, now)
        return lines(first, self._second(status, width, now)) if height > 1 else first

    def _first(self, status: dict[str, Any], width: int, now: float) -> Content:
        phase, since = status["phase"], status.get("phase_since")
        timer = ""
        if since:
            timer = f" {units.clock(now - since)}" if phase != "stopped" else f" {units.age(now - since)} ago"
        left = Content.assemble((f" {phase}{timer} ", f"bold $background on {COLORS.get(phase, '$primary')}"))
        steps = status.get("steps") or 0
        if steps:
            left = Content.assemble(left, "  step ", (str(status["step"]), "bold"), (f"/{steps} ", "$faint"))
        right = Content.assemble(*self._state(status, wide=width >= 70), " ")
        room = width - left.cell_length - right.cell_length - 2
        if steps and room >= 6:
            left = Content.assemble(left, self._steps(status["step"], steps, min(room, 60)))
        return row(left, right, width)

    def _steps(self, step: int, steps: int, width: int) -> Content:
        bar = units.progress(step, steps, width)
        full = bar.rstrip("─")
        return Content.assemble((full, "$primary"), (bar[len(full) :], "$line"))

    def _state(self, status: dict[str, Any], *, wide: bool) -> list[Any]:
        parts: list[Any] = []
        if status.get("eta_s") is not None and status["phase"] != "stopped":
            parts += [("eta ", "$faint"), units.clock(status["eta_s"]), "  "]
        parts += [("policy ", "$faint") if wide else "", (f"v{status['policy_version']}", "bold")]
        gate = status.get("gate")
        if gate:
            closed = gate["state"] != "open"
            text = "gate closed" if closed else "gate open"
            parts += ["  ", (text, "$warning" if closed else "$faint")]
            if gate.get("held"):
                parts.append((f" {gate['held']} held", "bold $warning"))
        return parts

    def _second(self, status: dict[str, Any], width: int, now: float) -> Content:
        facts = []
        checkpoint, groups = status.get("checkpoint"), status.get("groups")
        if groups:
            facts.append(f"groups {groups['open']} open, {groups['complete']} complete")
        if left_out := len(status.get("quarantined") or []):
            facts.append(f"{left_out} task{'s' if left_out > 1 else ''} quarantined")
        if status.get("last_update_s"):
            facts.append(f"last update {units.clock(status['last_update_s'])}")
        if status.get("forks") and (broken := units.forks(status["forks"][-1])):
            facts.append(f"forks {broken}")
        if checkpoint:
            facts.append(f"checkpoint step {checkpoint['step']}, {units.age(now - checkpoint['at'])} ago")
        message = " ".join((status.get("message") or "").split())
        if not message or self.snapshot.link in ("ended", "died"):  # the notice says it
            return row(faint(" " + " · ".join(facts)), Content(""), width)
        style = "$warning" if status["phase"] == "paused" else "$foreground"
        return row(Content.styled(f" {message}", style), faint((facts[-1] if facts else "") + " "), width)
