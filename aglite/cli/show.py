"""Rollouts as text: the table of `aglite rollouts`, the page of `aglite show`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aglite import strict_json, units
from aglite.cli.forest import call_tokens, forest, sample_tokens
from aglite.cli.logs import whole_id
from aglite.cli.where import find_run
from aglite.conversation import added_messages, message_lines, whole_list
from aglite.forks import diff_lines
from aglite.rollouts.causes import kind_of
from aglite.stored import StoredRun
from aglite.units import plain_json

INDENT = "    "
HEAD = ("id", "task", "state", "att", "calls", "samples", "sampled", "reward", "versions", "age", "cause")


def print_json(value: Any) -> None:
    sys.stdout.write(strict_json.dumps(value) + "\n")


DROPPED = ("samples", "att", "versions", "calls", "sampled", "age", "cause")
"""Columns that a narrow terminal does without, the first ones first."""


def table(rows: list[dict[str, Any]]) -> str:
    """One line a rollout, columns aligned; on a terminal as many as fit, with causes cut to what is left."""
    if not rows:
        return "no rollouts\n"
    now = time.time()
    right = {"att", "calls", "samples", "sampled", "reward", "age"}
    cells = [HEAD, *(_cells(row, now) for row in rows)]
    widths = dict(zip(HEAD, (max(len(line[i]) for line in cells) for i in range(len(HEAD))), strict=True))
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if room is not None:
        widths["cause"] = min(widths["cause"], 10)
        for name in DROPPED:
            if sum(widths.values()) + 2 * (len(widths) - 1) > room:
                del widths[name]
        if "cause" in widths:
            widths["cause"] += max(0, room - sum(widths.values()) - 2 * (len(widths) - 1))
    lines = []
    for line in cells:
        parts = []
        for name, text in zip(HEAD, line, strict=True):
            if name in widths:
                width = widths[name]
                text = text if len(text) <= width else text[: width - 1] + "…"
                parts.append(text.rjust(width) if name in right else text.ljust(width))
        lines.append("  ".join(parts).rstrip())
    if ended := _causes(rows):
        lines += ["", f"ended other than well: {ended}"]
    return "\n".join(lines) + "\n"


def _causes(rows: list[dict[str, Any]]) -> str:
    """How many of `rows` ended for each cause, and whose it is: `3 wall_time (policy), 1 launch (infrastructure)`."""
    ended = (row["cause"] for row in rows if row["cause"] and row["state"] in ("failed", "error", "cancelled"))
    counts = Counter(units.plain(cause.partition(":")[0]) for cause in ended)
    return ", ".join(
        f"{number} {code}" + (f" ({kind})" if (kind := kind_of(code)) else "") for code, number in counts.most_common()
    )


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
    detail = stored.rollout(whole_id(stored, name), tokens=tokens)
    if as_json:
        print_json(detail)
    else:
        sys.stdout.write("\n".join(page(plain_json(detail), tokens)) + "\n")


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
    by_id = {call["id"]: call for call in calls}
    added = added_messages([whole_list(call) for call in calls])
    for call, messages in zip(calls, added, strict=True):
        yield ""
        yield from _call(call, numbers)
        if call["fork_diff"]:
            yield from (f"{INDENT}{line}" for line in diff_lines(call["fork_diff"], numbers))
        for message in messages:
            yield from message_lines(message, INDENT)
        if tokens:
            yield from call_tokens(call, by_id, detail["token_texts"], INDENT)
    for call in detail["judge_calls"]:
        yield ""
        yield f"judge {call['model']}, {call['finished_at'] - call['started_at']:.1f} s; status {call['status']}"
        for message in [*(call["request"].get("messages") or []), *_answers(call["reply"])]:
            yield from message_lines(message, INDENT)
    for sample in detail["sample_rows"]:
        yield ""
        chain = ", ".join(f"{numbers[call]}{'' if trained else ' (no loss)'}" for call, trained in sample["calls"])
        yield (
            f"sample trained in step {sample['step']}: call {chain}; {sample['trained_tokens']} of {sample['tokens']} "
            f"tokens, advantage {sample['advantage']:+.3f}, weight {sample['weight']:.2e} a token"
        )
        if tokens:
            yield from sample_tokens(sample, INDENT)
    if tokens and calls:
        yield ""
        yield from forest(calls, detail["sample_rows"])


def _answers(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages in what a judge's endpoint answered; its error as one."""
    if "error" in reply:
        return [{"role": "error", "content": json.dumps(reply["error"], ensure_ascii=False)}]
    return [choice["message"] for choice in reply.get("choices") or () if choice.get("message")]


def _call(call: dict[str, Any], numbers: dict[int, int]) -> Iterator[str]:
    how = call["fork_cause"] or f"continues call {numbers.get(call['parent_id'], call['parent_id'])}"
    took = f"{call['finished_at'] - call['started_at']:.1f} s" if call["finished_at"] else "not finished"
    held = f" ({call['held_s']:.0f} s of it held)" if call["held_s"] >= 1 else ""
    end = ", ".join(part for part in (call["status"], call["finish_reason"], call["error"]) if part)
    yield f"call {numbers[call['id']]}: {how}; {call['dialect']}, {took}{held}; {end}"
    spans = ", ".join(f"{count} by v{version}" for version, count in call["versions"]) or "none"
    held = ", held to a grammar" if call["constrained"] else ""
    yield f"{INDENT}{call['prompt_tokens']} prompt tokens, {call['sampled_tokens']} sampled ({spans}){held}"
