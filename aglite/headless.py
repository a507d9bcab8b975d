"""A run as plain lines, for logs, pipes and `--headless`: pure functions from the control API's JSON to text."""

from __future__ import annotations

import time
from typing import Any

from aglite import units

FINER = (
    ("{zero_advantage_groups} of {groups} groups without advantage", ("zero_advantage_groups", "groups")),
    ("{samples_per_rollout:.1f} samples a rollout", ("samples_per_rollout",)),
    ("staleness {staleness_mean:.1f}, at most {staleness_max}", ("staleness_mean", "staleness_max")),
    ("{rollouts_stale} too stale", ("rollouts_stale",)),
    ("{groups_dropped} groups dropped", ("groups_dropped",)),
    ("gap of engine and trainer {logprob_gap_mean:.1e}", ("logprob_gap_mean",)),
    ("entropy {entropy:.2f}", ("entropy",)),
    ("gradient norm {grad_norm:.2f}", ("grad_norm",)),
)
"""What a step's second line tells, and the metrics that each part needs."""

NOTHING = "none yet"
MARKS = {"info": "", "warning": "warning: ", "error": "error: "}


def line(event: dict[str, Any]) -> str | None:
    """One event as a line, or None for what would only be noise: single rollouts that went as they should."""
    if event["kind"] == "rollout" and event["level"] == "info":
        return None
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    first, *rest = [*units.plain(describe(event)).splitlines(), *_finer(event)] or [""]
    text = "\n".join([first, *(" " * 22 + more.strip() for more in rest)])
    return f"{at}  {event['kind']:<10}  {MARKS.get(event['level'], '')}{text}"


def _finer(event: dict[str, Any]) -> list[str]:
    """A step's finer metrics, in a line of their own."""
    data = event.get("data") or {}
    if event["kind"] != "step" or "reward_mean" not in data:
        return []
    parts = [form.format(**data) for form, keys in FINER if all(key in data for key in keys)]
    return [" · ".join(parts)] if parts else []


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
    if broken := units.forks(data.get("forks") or {}):
        parts.append(f"forks: {broken}")
    if lost := units.causes(data.get("causes") or {}):
        parts.append(f"not well: {lost}")
    if "kl_rollout" in data:
        parts.append(f"kl {data['kl_rollout']:.1e}")
    if data.get("seconds"):
        parts.append(f"update {units.clock(data['seconds'])}")
    return " · ".join(parts)


def now_line(status: dict[str, Any], now: float) -> str:
    """The status as one line: what a log shows between two events."""
    gate = status.get("gate") or {}
    checkpoint = status.get("checkpoint")
    parts = [
        f"{status['phase']} {units.clock(now - status['phase_since'])}",
        f"step {status['step']} of {status['steps']}" if status["steps"] else "",
        f"eta {units.clock(status['eta_s'])}" if status.get("eta_s") is not None else "",
        f"policy v{status['policy_version']}",
        f"checkpoint of step {checkpoint['step']}, {units.age(now - checkpoint['at'])} ago" if checkpoint else "",
        text if (text := queue(status, units.UNFINISHED)) != NOTHING else "",
        f"gate {gate['state']}, {gate['held']} held" if gate.get("held") else "",
        engine(status),
        *map(gpu, status.get("gpu") or ()),
        host(status),
        status.get("message") or "",
    ]
    at = time.strftime("%H:%M:%S", time.localtime(now))
    return f"{at}  {'now':<10}  " + " · ".join(" ".join(part.split()) for part in parts if part)


def queue(status: dict[str, Any], states: tuple[str, ...] = units.QUEUE) -> str:
    counts = status.get("queue") or {}
    parts = [f"{counts[state]} {state}" for state in states if counts.get(state)]
    return " · ".join(parts) or NOTHING


def engine(status: dict[str, Any]) -> str:
    now = status.get("engine") or {}
    if not now or not status.get("pid"):
        return ""
    parts = [
        f"{now.get('kind', '')}  {now.get('tokens_per_s') or 0:.0f} tok/s",
        f"{now.get('running', 0)} running",
        f"{now.get('waiting', 0)} waiting",
    ]
    if now.get("kv_capacity"):
        parts.append(f"KV {now['kv_tokens'] / now['kv_capacity']:.0%}")
    prompt = now.get("prefill_tokens", 0) + now.get("reused_tokens", 0)
    if prompt:
        parts.append(f"prefix hits {now['reused_tokens'] / prompt:.0%}")
    return " · ".join(parts)


def gpu(one: dict[str, Any]) -> str:
    load = "" if one["util"] is None else f"  {one['util']:.0f}%"
    parts = [one["name"] + load, f"{units.size(one['mem_used'])} of {units.size(one['mem_total'])}"]
    if one.get("power_w") is not None:
        parts.append(f"{one['power_w']:.0f} W")
    if one.get("temp_c") is not None:
        parts.append(f"{one['temp_c']:.0f} °C")
    return " · ".join(parts)


def host(status: dict[str, Any]) -> str:
    now = status.get("host") or {}
    parts = []
    if now.get("cpu_percent") is not None:
        parts.append(f"CPU {now['cpu_percent']:.0f}%")
    if now.get("ram_total"):
        parts.append(f"RAM {units.size(now['ram_used'])} of {units.size(now['ram_total'])}")
    if now.get("disk_free") is not None:
        parts.append(f"disk {units.size(now['disk_free'])} free")
    if now.get("db_bytes") is not None:
        parts.append(f"database {units.size(now['db_bytes'])}")
    return " · ".join(parts)
