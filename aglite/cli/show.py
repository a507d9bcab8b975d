"""Rollouts as text: the table of `aglite rollouts`, the page of `aglite show`, the output behind `aglite logs`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aglite import units
from aglite.cli.where import find_run, open_run
from aglite.errors import AgliteError

ID_LENGTH = 12
"""Length of a whole rollout id: `r-` and ten hexadecimal digits."""
INDENT = "    "


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """One line a rollout, columns aligned, causes cut to what the terminal leaves."""
    if not rows:
        return "no rollouts\n"
    now = time.time()
    head = ("id", "task", "state", "att", "calls", "samples", "sampled", "reward", "versions", "age", "cause")
    right = {"att", "calls", "samples", "sampled", "reward", "age"}
    cells = [head, *(_cells(row, now) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    room = shutil.get_terminal_size((160, 24)).columns - sum(widths[:-1]) - 2 * (len(head) - 1)
    lines = []
    for line in cells:
        parts = [
            text.rjust(width) if name in right else text.ljust(width)
            for name, text, width in zip(head[:-1], line[:-1], widths[:-1], strict=True)
        ]
        cause = line[-1] if len(line[-1]) <= max(room, 10) else line[-1][: max(room, 10) - 1] + "…"
        lines.append("  ".join([*parts, cause]).rstrip())
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    return (
        row["id"],
        row["task_id"],
        row["state"],
        str(row["attempt"]),
        str(row["calls"]),
        str(row["samples"]),
        units.count(row["sampled_tokens"]),
        units.reward(row["reward"]),
        units.versions(row),
        units.age(now - row["created_at"]),
        row["cause"],
    )


def rollout(directory: Path | None, name: str, *, tokens: bool, as_json: bool) -> None:
    source = open_run(directory)
    detail = source.rollout(_whole_id(source, name))
    if not tokens:
        for call in detail["calls"]:
            for field in ("prompt_ids", "response_ids", "logprobs"):
                call.pop(field, None)
        for sample in detail["samples"]:
            for field in ("input_ids", "loss_mask", "logprobs", "versions"):
                sample.pop(field, None)
    if as_json:
        print_json(detail)
    else:
        sys.stdout.write("\n".join(page(detail, tokens)) + "\n")


def logs(directory: Path | None, name: str, attempt: int | None) -> None:
    source = open_run(directory)
    detail = source.rollout(_whole_id(source, name))
    wanted = attempt or detail["attempt"]
    file = find_run(directory).rollout_log(detail["id"], wanted)
    if not file.exists():
        raise AgliteError(
            f"rollout {detail['id']} has no log of attempt {wanted} (state {detail['state']})",
            "the agent had not started" if not detail["attempt"] else f"it has attempts 1 to {detail['attempt']}",
        )
    with open(file, "rb") as log:
        shutil.copyfileobj(log, sys.stdout.buffer)


def _whole_id(source: Any, name: str) -> str:
    if len(name) >= ID_LENGTH:
        return name
    found = [row["id"] for row in source.rollouts(limit=1_000_000) if row["id"].startswith((name, f"r-{name}"))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise AgliteError(f"no rollout {name} in this run", "`aglite rollouts` lists them")
    raise AgliteError(f"{name} fits {len(found)} rollouts", f"give more of the id: {', '.join(found[:5])} …")


def page(detail: dict[str, Any], tokens: bool) -> Iterator[str]:
    yield f"rollout {detail['id']}   task {detail['task_id']}   group {detail['group_id']}   {detail['split']}"
    ran = ""
    if detail["started_at"]:
        ran = f", ran {units.clock((detail['finished_at'] or time.time()) - detail['started_at'])}"
    cause = f" ({detail['cause']})" if detail["cause"] else ""
    yield f"{detail['state']}{cause}, attempt {detail['attempt']} on {detail['backend']}{ran}"
    breakdown = "   ".join(f"{name} {value:.2f}" for name, value in detail["breakdown"].items())
    yield f"reward {units.reward(detail['reward'])}" + (f"   {breakdown}" if breakdown else "")
    yield (
        f"tokens: {detail['prompt_tokens']} prompt, {detail['sampled_tokens']} sampled, "
        f"{detail['trained_tokens']} trained; policy {units.versions(detail) or '–'}"
    )
    if detail["flags"]:
        yield f"flags: {', '.join(detail['flags'])}"
    for number, call in enumerate(detail["calls"], 1):
        yield ""
        yield from _call(number, call, tokens)
    for sample in detail["samples"]:
        yield ""
        chain = " → ".join(str(call) for call, *_ in sample["calls"])
        yield f"sample: calls {chain}, advantage {sample['advantage']:+.3f}, weight {sample['weight']:.2e} a token"
        if tokens:
            yield from _numbers("ids", sample["input_ids"], "d")
            yield from _numbers("mask", sample["loss_mask"], "d")


def _call(number: int, call: dict[str, Any], tokens: bool) -> Iterator[str]:
    how = call["fork_cause"] or f"goes on from call {call['parent_id']}"
    took = f"{call['finished_at'] - call['started_at']:.1f} s" if call["finished_at"] else "not finished"
    spans = ", ".join(f"{count} by v{version}" for version, count in call["versions"])
    yield f"call {number} (id {call['id']}): {how}; {call['dialect']}, {call['status']}, {call['finish_reason']}, {took}"
    if spans:
        yield f"{INDENT}sampled {spans}"
    for message in [*call.get("new_messages", ()), *([call["reply"]] if call.get("reply") else [])]:
        yield from units.message_lines(message, INDENT)
    if tokens:
        yield from _numbers("prompt", call["prompt_ids"], "d")
        yield from _numbers("response", call["response_ids"], "d")
        yield from _numbers("logprobs", call["logprobs"], ".4f")


def _numbers(name: str, numbers: list[float], form: str) -> Iterator[str]:
    """A long row of numbers, wrapped."""
    line = f"{INDENT}{name}:"
    for number in numbers:
        text = format(number, form)
        if len(line) + len(text) >= 118:
            yield line
            line = INDENT * 2 + text
        else:
            line += f" {text}"
    yield line
