"""A memory plan as a table to read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from aglite.memory_plan.advice import Change
from aglite.memory_plan.plan import GIB, Plan

ESTIMATED = ("CUDA contexts", "vLLM workspaces", "CUDA graphs", "allocator slack")


def table(plan: Plan, name: str) -> list[str]:
    """Lines: GiB of the card `name` by phase and owner, host memory, and what the cache holds."""
    owners = list(dict.fromkeys(owner for phase in plan.phases for owner in phase.held))
    rows = [["GiB", *(phase.name for phase in plan.phases)]]
    rows += [[_label(owner), *(_cell(phase.held.get(owner, 0)) for phase in plan.phases)] for owner in owners]
    rows.append(["total", *(f"{phase.total / GIB:.1f}" for phase in plan.phases)])
    rows.append(["left", *(f"{(plan.usable - phase.total) / GIB:.1f}" for phase in plan.phases)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"memory plan for {name}, {plan.usable / GIB:.1f} GiB usable: {_verdict(plan)}"]
    for row in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"  {row[0]:<{widths[0]}}  {'  '.join(numbers)}")
    lines.append(
        f"  * estimated; everything else follows from the model's sizes ({_millions(plan.parameters)} parameters"
        f", {_millions(plan.trained)} trained)"
    )
    parts = ", ".join(f"{owner} {held / GIB:.1f}" for owner, held in plan.host.items())
    lines.append(f"  host memory: up to {sum(plan.host.values()) / GIB:.1f} GiB ({parts})")
    lines.append(
        f"  KV cache: {plan.kv_tokens:,} tokens, or {plan.rollouts} generations of {plan.context_length:,} at once"
    )
    return lines


def advice_lines(found: Sequence[tuple[Change, ...]]) -> str:
    """What helps, in a sentence for an error's mend."""
    if not found:
        return "no change of settings that was tried makes it fit: use a smaller model, or a card with more memory"
    ways = [" ".join(f"--set {shlex.quote(str(change))}" for change in changes) for changes in found]
    return "it fits with " + ", or with ".join(ways)


def _label(owner: str) -> str:
    return f"{owner} *" if owner in ESTIMATED else owner


def _cell(held: int) -> str:
    return f"{held / GIB:.1f}" if held else "-"


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return f"fits, {plan.peak.total / GIB:.1f} at most ({plan.peak.name})"
    return "does not fit: " + "; ".join(plan.problems)


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
