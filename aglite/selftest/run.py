"""Runs the items one after the other, each in a process of its own: one that dies or hangs spoils no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from aglite.errors import RecipeError
from aglite.memory_plan.card import present_card
from aglite.selftest.bench import Bench
from aglite.selftest.items import ITEMS, NAMED, Item, Outcome
from aglite.versions import findings

NO_GPU = "there is no NVIDIA GPU here"


def chosen(only: Iterable[str] = ()) -> list[Item]:
    """The items named in `only`, or all. Raises RecipeError for an unknown name."""
    wanted = set(only)
    if unknown := sorted(wanted - NAMED.keys()):
        raise RecipeError(f"--only: the self-test has no item {unknown[0]!r}", f"it has {', '.join(NAMED)}")
    return [item for item in ITEMS if not wanted or item.name in wanted]


def run_items(items: Sequence[Item], bench: Bench, on_line: Callable[[str], None]) -> list[Outcome]:
    """Run them in their order. Logs are kept in the bench's scratch folder."""
    outcomes = []
    for place, item in enumerate(items, 1):
        on_line(f"[{place}/{len(items)}] {item.name}: {item.about}")
        outcome = _in_a_process(item, bench)
        on_line(f"  {line_of(outcome)}")
        outcomes.append(outcome)
    return outcomes


def _in_a_process(item: Item, bench: Bench) -> Outcome:
    out, log = bench.scratch / f"{item.name}.json", bench.scratch / f"{item.name}.log"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "aglite.selftest.items", item.name, item.place]
    command += [
        "--model",
        str(bench.model),
        "--scratch",
        str(bench.scratch),
        "--device",
        bench.device,
        "--out",
        str(out),
    ]
    started = time.monotonic()
    with log.open("w") as stream:
        child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(item.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    seconds = round(time.monotonic() - started, 1)
    if out.exists():
        return Outcome(**json.loads(out.read_text()))
    how = f"took more than {item.timeout_s} s" if code is None else f"its process ended with exit code {code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(item.name, "fail", f"{how}; the last line of {log}: {lines[-1] if lines else '(empty)'}", seconds)


def _end(child: subprocess.Popen[Any]) -> None:
    """End an item's process group, whatever is left of it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended with all that it started
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def about_machine() -> dict[str, Any]:
    """What a report is worth nothing without."""
    card = present_card()
    versions = {one.name: one.version for one in findings()}
    return {"gpu": card.name if card else None, "gpu_bytes": card.total if card else 0, "versions": versions}


def report(outcomes: list[Outcome]) -> dict[str, Any]:
    return {**about_machine(), "items": [asdict(outcome) for outcome in outcomes]}


def lines_of(outcomes: list[Outcome]) -> list[str]:
    """The table to report back."""
    machine = about_machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    counts = {status: sum(one.status == status for one in outcomes) for status in ("pass", "fail", "skip")}
    width = max((len(one.name) for one in outcomes), default=0)
    card = f"{machine['gpu']}, {machine['gpu_bytes'] / 2**30:.1f} GiB" if machine["gpu"] else "no GPU"
    return [
        f"{card}; {versions}",
        *(f"{one.name:<{width}}  {line_of(one)}" for one in outcomes),
        ", ".join(f"{count} {status}" for status, count in counts.items()),
    ]


def line_of(outcome: Outcome) -> str:
    figures = ", ".join(f"{name} {_text(value)}" for name, value in outcome.figures.items())
    rest = "; ".join(part for part in (outcome.detail, figures) if part)
    return f"{outcome.status}  {outcome.seconds:7.1f} s  {rest}".rstrip()


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
