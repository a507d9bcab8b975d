"""`aglite status`: one readable screen. Imports next to nothing, so that it can be asked every second."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from aglite import units
from aglite.cli.where import open_run


def fast(args: list[str]) -> int | None:
    """Run `aglite status ARGS` without typer; None when ARGS need its parser (help, a mistake)."""
    directory, as_json = None, False
    rest = iter(args)
    for arg in rest:
        if arg == "--json":
            as_json = True
        elif arg == "--dir":
            directory = next(rest, None)
            if directory is None:
                return None
        elif arg.startswith("--dir="):
            directory = arg.removeprefix("--dir=")
        else:
            return None
    show(Path(directory) if directory is not None else None, as_json)
    return 0


def show(directory: Path | None, as_json: bool) -> None:
    status = open_run(directory).status()
    sys.stdout.write(json.dumps(status) + "\n" if as_json else render(status, time.time()))


def render(status: dict[str, Any], now: float) -> str:
    trains = _trains(status)
    rows = [
        ("run", _run(status)),
        ("phase", _phase(status, now)),
        ("step", _step(status, now) if trains else ""),
        ("rollouts", _queue(status)),
        ("reward", _reward(status) if trains else ""),
        ("validation", _validation(status) if trains else ""),
        ("engine", _engine(status)),
        ("gpu", "\n".join(_gpu(gpu) for gpu in status.get("gpu") or [])),
        ("host", _host(status)),
        ("note", status.get("message") or ""),
    ]
    lines = []
    for name, text in rows:
        for number, part in enumerate(text.splitlines()):
            lines.append(f"{name if number == 0 else '':<12}{part}")
    return "\n".join(lines) + "\n"


def _trains(status: dict[str, Any]) -> bool:
    """`aglite serve`, `run` and `eval` have no steps."""
    return status["steps"] > 0


def _run(status: dict[str, Any]) -> str:
    facts = [status.get("model"), status.get("mode") if _trains(status) else "no training"]
    where = f"process {status['pid']}" if status.get("pid") else "not running"
    return f"{status['run']}  {' · '.join(fact for fact in facts if fact)}\n{status.get('dir', '')} ({where})"


def _phase(status: dict[str, Any], now: float) -> str:
    if not status.get("pid"):
        since = status.get("phase_since")
        return f"{status['phase']}" + (f" {units.age(now - since)} ago" if since else "")
    gate = status.get("gate") or {}
    held = f", {gate['held']} held" if gate.get("held") else ""
    return (
        f"{status['phase']} for {units.clock(now - status['phase_since'])}   "
        f"policy v{status['policy_version']}   gate {gate.get('state', '–')}{held}"
    )


def _step(status: dict[str, Any], now: float) -> str:
    parts = [f"{status['step']} of {status['steps']}  {units.progress(status['step'], status['steps'], 24)}"]
    if status.get("eta_s") is not None:
        parts.append(f"eta {units.clock(status['eta_s'])}")
    checkpoint = status.get("checkpoint")
    if checkpoint:
        parts.append(f"checkpoint of step {checkpoint['step']}, {units.age(now - checkpoint['at'])} ago")
    return "   ".join(parts)


def _queue(status: dict[str, Any]) -> str:
    queue = status.get("queue") or {}
    parts = [f"{queue[state]} {state}" for state in units.QUEUE if queue.get(state)]
    return " · ".join(parts) or "none yet"


def _reward(status: dict[str, Any]) -> str:
    points = status.get("reward") or []
    if not points:
        return "no step yet"
    last = points[-1]
    spread = f" ± {units.reward(last['std'])}" if last.get("std") is not None else ""
    curve = units.sparkline([point["mean"] for point in points], 40)
    return f"{curve}  {units.reward(last['mean'])}{spread} (step {last['step']})"


def _validation(status: dict[str, Any]) -> str:
    points = status.get("val") or []
    if not points:
        return "not evaluated yet"
    shown = points if len(points) <= 4 else [points[0], *points[-3:]]
    text = " → ".join(f"{units.reward(p['mean'])} (step {p['step']})" for p in shown)
    error = points[-1].get("stderr")
    return text + (f"   ± {units.reward(error)}, {points[-1]['n']} tasks" if error is not None else "")


def _engine(status: dict[str, Any]) -> str:
    engine = status.get("engine") or {}
    if not engine or not status.get("pid"):
        return ""
    parts = [
        f"{engine.get('kind', '')}  {engine.get('tokens_per_s') or 0:.0f} tok/s",
        f"{engine.get('running', 0)} running",
        f"{engine.get('waiting', 0)} waiting",
    ]
    if engine.get("kv_capacity"):
        parts.append(f"KV {engine['kv_tokens'] / engine['kv_capacity']:.0%}")
    return " · ".join(parts)


def _gpu(gpu: dict[str, Any]) -> str:
    parts = [f"{gpu['name']}  {gpu['util']:.0f}%", f"{units.size(gpu['mem_used'])} of {units.size(gpu['mem_total'])}"]
    if gpu.get("power_w") is not None:
        parts.append(f"{gpu['power_w']:.0f} W")
    if gpu.get("temp_c") is not None:
        parts.append(f"{gpu['temp_c']:.0f} °C")
    return " · ".join(parts)


def _host(status: dict[str, Any]) -> str:
    host = status.get("host") or {}
    if not host:
        return ""
    parts = []
    if host.get("cpu_percent") is not None:
        parts.append(f"CPU {host['cpu_percent']:.0f}%")
    if host.get("ram_total"):
        parts.append(f"RAM {units.size(host['ram_used'])} of {units.size(host['ram_total'])}")
    if host.get("disk_free") is not None:
        parts.append(f"disk {units.size(host['disk_free'])} free")
    if host.get("db_bytes") is not None:
        parts.append(f"database {units.size(host['db_bytes'])}")
    return " · ".join(parts)
