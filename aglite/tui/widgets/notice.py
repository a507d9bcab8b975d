"""One strip for what a person should know now: lost, died, ended, paused, a stop under way. Hidden otherwise."""

from __future__ import annotations

from textual.content import Content

from aglite import units
from aglite.tui.feed import Snapshot
from aglite.tui.widgets.panel import Panel


class Notice(Panel):
    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        text, level = notice(snapshot)
        self.display = bool(text)
        self.set_class(level == "error", "-error")
        self.set_class(level == "good", "-good")

    def draw(self, width: int, height: int, now: float) -> Content:
        text, _ = notice(self.snapshot)
        return Content(f" {text}").truncate(width, ellipsis=True)


def notice(snapshot: Snapshot) -> tuple[str, str]:
    """The text and its level: warning, error or good; ('', '') when there is nothing to say."""
    status = snapshot.status or {}
    if snapshot.link == "lost":
        silent = "No answer from the supervisor, though its process lives. Still trying …"
        return snapshot.problem or silent, "warning"
    if snapshot.link == "died":
        return "The supervisor died: see logs/supervisor.log. `aglite up` resumes the run.", "error"
    if snapshot.link == "ended":
        if not status:
            return "Nothing runs here, and nothing is recorded yet. `aglite up` starts a run.", "warning"
        if status["steps"] and status["step"] >= status["steps"]:
            return f"Finished{learned(status)}", "good"
        if status.get("message"):
            return f"Failed: {' '.join(status['message'].split())}{_mend(status)}", "error"
        return f"Stopped after step {status['step']} of {status['steps']}. `aglite up` goes on.", "warning"
    return "", ""


def _mend(status: dict) -> str:
    """What to do about the error that ended the run, as its event says."""
    errors = [event for event in status.get("log") or [] if event["kind"] == "run" and event["level"] == "error"]
    mend = errors[-1]["data"].get("mend") if errors and status["message"] in errors[-1]["text"] else ""
    return f" → {mend}" if mend else ""


def learned(status: dict) -> str:
    """What a finished run shows for itself: validation before and after, and where the weights are."""
    text = ""
    val = status.get("val") or []
    if len(val) > 1:
        text = f": validation {units.reward(val[0]['mean'])} → {units.reward(val[-1]['mean'])}"
    checkpoint = status.get("checkpoint")
    if checkpoint:
        text += f". Use it: aglite serve {status['dir']}/checkpoints/step-{checkpoint['step']}"
    return text
