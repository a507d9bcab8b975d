"""The training steps as a table: `aglite steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aglite import units

Cell = Callable[[dict[str, Any]], str]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a step, columns aligned; numbers that a step does not have are left empty."""
    if not rows:
        return "no steps yet\n"
    cells = [list(COLUMNS), *([_cell(column, row) for column in COLUMNS.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines) + "\n"


def _cell(column: Cell, row: dict[str, Any]) -> str:
    try:
        return column({**row["metrics"], **{key: row[key] for key in ("step", "version", "state")}})
    except KeyError:
        return ""


COLUMNS: dict[str, Cell] = {
    "step": lambda m: str(m["step"]),
    "version": lambda m: f"v{m['version']}" if m["state"] == "applied" else m["state"],
    "reward": lambda m: units.reward(m["reward_mean"]),
    "±": lambda m: units.reward(m["reward_std"]),
    "rollouts": lambda m: f"{m['rollouts_trained']}/{m['rollouts']}",
    "stale": lambda m: str(m["rollouts_stale"]),
    "A=0": lambda m: f"{m['zero_advantage_groups']}/{m['groups']}",
    "dropped": lambda m: str(m["groups_dropped"]),
    "samples": lambda m: f"{m['samples_per_rollout']:.1f}",
    "tokens": lambda m: units.count(m["trained_tokens"]),
    "age": lambda m: f"{m['staleness_mean']:.1f}/{m['staleness_max']}",
    "gap": lambda m: f"{m['logprob_gap_mean']:.0e}",
    "kl": lambda m: f"{m['kl_rollout']:.0e}",
    "entropy": lambda m: f"{m['entropy']:.2f}",
    "grad": lambda m: f"{m['grad_norm']:.2f}",
    "update": lambda m: units.clock(m["seconds"]),
}
"""Heads and what stands below them: rollouts trained of those graded, groups without advantage, groups dropped so far,
samples a rollout, mean and highest age of the trained tokens in policy versions, gap of log-probabilities between
engine and trainer."""
