"""`aglite status`: one readable screen. Imports next to nothing, so that it can be asked every second."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aglite import headless, strict_json, units
from aglite.cli.where import open_run

WIDE = 10_000
"""Where no terminal would break a line."""


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
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    sys.stdout.write(strict_json.dumps(status) + "\n" if as_json else render(status, time.time(), width))


def render(status: dict[str, Any], now: float, width: int = WIDE) -> str:
    """The status in lines of at most `width` columns."""
    trains = _trains(status)
    rows = [
        ("run", _run(status)),
        ("phase", _phase(status, now)),
        ("step", _step(status, now) if trains else ""),
        ("rollouts", headless.queue(status)),
        ("causes", units.causes(status.get("causes") or {})),
        ("reward", _reward(status, width - 12) if trains else ""),
        ("calls", _calls(status) if trains else ""),
        ("validation", _validation(status) if trains else ""),
        ("engine", headless.engine(status)),
        ("gpu", "\n".join(headless.gpu(gpu) for gpu in status.get("gpu") or [])),
        ("host", headless.host(status)),
        ("note", status.get("message") or ""),
    ]
    lines = []
    for name, text in rows:
        parts = [line for part in text.splitlines() for line in _wrapped(part, width - 12)]
        lines += [f"{name if number == 0 else '':<12}{part}" for number, part in enumerate(parts)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> Iterator[str]:
    """`text` in lines of at most `width`, broken between its parts, or where that is not enough between words."""
    width, line = max(width, 8), ""
    for part in re.split(r"(?<= · )|(?<=   )", text):
        if line and len(line) + len(part.rstrip(" ·")) > width:
            yield from _cut(line, width)
            line = ""
        line += part
    yield from _cut(line, width)


def _cut(line: str, width: int) -> Iterator[str]:
    line = line.rstrip(" ·")
    while len(line) > width:
        at = line.rfind(" ", 1, width + 1)
        yield line[: at if at > 0 else width].rstrip()
        line = line[at if at > 0 else width :].lstrip()
    yield line


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


def _reward(status: dict[str, Any], width: int) -> str:
    points = status.get("reward") or []
    if not points:
        return "no step yet"
    last = points[-1]
    spread = f" ± {units.reward(last['std'])}" if last.get("std") is not None else ""
    curve = units.sparkline([point["mean"] for point in points], min(40, max(8, width)))
    return f"{curve}  {units.reward(last['mean'])}{spread} (step {last['step']})"


def _calls(status: dict[str, Any]) -> str:
    """Of the last step: how many calls continued the recorded tokens, and why others did not."""
    points = status.get("forks") or []
    if not points:
        return ""
    last = points[-1]
    begun = last["first"] + last["new_thread"]
    broken = units.forks(last) or "none broken off"
    return f"{last['continued']} continued, {begun} began a conversation, {broken} (step {last['step']})"


def _validation(status: dict[str, Any]) -> str:
    points = status.get("val") or []
    if not points:
        return "not evaluated yet"
    shown = points if len(points) <= 4 else [points[0], *points[-3:]]
    text = " → ".join(f"{units.reward(p['mean'])} (step {p['step']})" for p in shown)
    error = points[-1].get("stderr")
    text += f"   ± {units.reward(error)}, {points[-1]['n']} tasks" if error is not None else ""
    best = status.get("best")
    return text + (f"\nbest: {units.reward(best['mean'])} in {best['path']}" if best else "")
