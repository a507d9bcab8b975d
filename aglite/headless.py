"""A run as plain lines, for logs, pipes and `--headless`: pure functions from the control API's JSON to text."""

from __future__ import annotations

import time
from typing import Any

from aglite import units

MARKS = {"info": "", "warning": "warning: ", "error": "error: "}


def line(event: dict[str, Any]) -> str | None:
    """One event as a line, or None for what would only be noise: single rollouts that went as they should."""
    if event["kind"] == "rollout" and event["level"] == "info":
        return None
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    first, *rest = describe(event).splitlines() or [""]
    text = "\n".join([first, *(" " * 22 + more.strip() for more in rest)])
    return f"{at}  {event['kind']:<10}  {MARKS.get(event['level'], '')}{text}"


def _outcome(data: dict[str, Any]) -> str:
    """What became of a step that changed nothing, and why."""
    if data.get("state") == "applied":
        return ""
    equal = data.get("groups") and data.get("zero_advantage_groups") == data["groups"]
    return f" {data.get('state')} (in every group all rewards are equal)" if equal else f" {data.get('state')}"


def describe(event: dict[str, Any]) -> str:
    """The text of an event; a step's is made of its metrics."""
    data = event.get("data") or {}
    if event["kind"] != "step" or "reward_mean" not in data:
        return str(event["text"])
    parts = [
        f"step {data['step']}{_outcome(data)}",
        f"reward {data['reward_mean']:.3f} ± {data['reward_std']:.2f}",
        f"{data['rollouts']} rollouts",
        f"{units.count(data['trained_tokens'])} tokens trained",
    ]
    if "kl_rollout" in data:
        parts.append(f"kl {data['kl_rollout']:.1e}")
    if data.get("seconds"):
        parts.append(f"update {units.clock(data['seconds'])}")
    return " · ".join(parts)
