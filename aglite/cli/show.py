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
from aglite.cli.where import find_run
from aglite.conversation import added_messages, message_lines, whole_list
from aglite.errors import AgliteError
from aglite.stored import StoredRun
from aglite.units import plain_json

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
        " ".join(units.plain(row["cause"]).split()),
    )


def rollout(directory: Path | None, name: str, *, tokens: bool, as_json: bool) -> None:
    stored = StoredRun(find_run(directory))
    detail = stored.rollout(_whole_id(stored, name), tokens=tokens)
    if as_json:
        print_json(detail)
    else:
        sys.stdout.write("\n".join(page(plain_json(detail), tokens)) + "\n")


def logs(directory: Path | None, name: str, attempt: int | None) -> None:
    stored = StoredRun(find_run(directory))
    row = stored.store.rollout(_whole_id(stored, name))
    wanted = attempt or row["attempt"]
    file = stored.run_dir.rollout_log(row["id"], wanted)
    if not file.exists():
        raise AgliteError(
            f"rollout {row['id']} has no log of attempt {wanted} (it is {row['state']})",
            f"it has attempts 1 to {row['attempt']}" if row["attempt"] else "its agent has not been started",
        )
    sys.stdout.flush()
    with open(file, "rb") as log:
        shutil.copyfileobj(log, sys.stdout.buffer)


def _whole_id(stored: StoredRun, name: str) -> str:
    if len(name) >= ID_LENGTH:
        return name
    found = [row["id"] for row in stored.rollouts() if row["id"].startswith((name, f"r-{name}"))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise AgliteError(f"no rollout {name} in {stored.run_dir.path}", "`aglite rollouts` lists them")
    raise AgliteError(f"{name} fits {len(found)} rollouts", f"give more of the id: {', '.join(found[:5])} …")


def page(detail: dict[str, Any], tokens: bool) -> Iterator[str]:
    yield f"rollout {detail['id']}   task {detail['task_id']}   group {detail['group'] or '–'}   {detail['split']}"
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
    calls = detail["call_rows"]
    numbers = {call["id"]: number for number, call in enumerate(calls, 1)}
    added = added_messages([whole_list(call) for call in calls])
    for call, messages in zip(calls, added, strict=True):
        yield ""
        yield from _call(call, numbers)
        for message in messages:
            yield from message_lines(message, INDENT)
        if tokens:
            yield from _numbers("prompt", call["prompt_ids"], "d")
            yield from _numbers("response", call["response_ids"], "d")
            yield from _numbers("logprobs", call["logprobs"], ".4f")
    for sample in detail["sample_rows"]:
        yield ""
        chain = ", ".join(f"{numbers[call]}{'' if trained else ' (no loss)'}" for call, trained in sample["calls"])
        yield (
            f"sample trained in step {sample['step']}: call {chain}; {sample['trained_tokens']} of {sample['tokens']} "
            f"tokens, advantage {sample['advantage']:+.3f}, weight {sample['weight']:.2e} a token"
        )
        if tokens:
            yield from _numbers("ids", sample["input_ids"], "d")
            yield from _numbers("mask", sample["loss_mask"], "d")


def _call(call: dict[str, Any], numbers: dict[int, int]) -> Iterator[str]:
    how = call["fork_cause"] or f"continues call {numbers.get(call['parent_id'], call['parent_id'])}"
    took = f"{call['finished_at'] - call['started_at']:.1f} s" if call["finished_at"] else "not finished"
    held = f" ({call['held_s']:.0f} s of it held)" if call["held_s"] >= 1 else ""
    end = ", ".join(part for part in (call["status"], call["finish_reason"], call["error"]) if part)
    yield f"call {numbers[call['id']]}: {how}; {call['dialect']}, {took}{held}; {end}"
    spans = ", ".join(f"{count} by v{version}" for version, count in call["versions"]) or "none"
    yield f"{INDENT}{call['prompt_tokens']} prompt tokens, {call['sampled_tokens']} sampled ({spans})"


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
