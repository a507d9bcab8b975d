"""What a rollout is worth and why: its reward, what made it up, why it did not end well, what the grader's judge said.
Pure functions from its JSON to blocks of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from textual.content import Content

from aglite import units
from aglite.rollouts.why import flag, why
from aglite.tui.widgets.panel import faint, gauge
from aglite.tui.widgets.queue import MARKS
from aglite.tui.widgets.talk import message_lines


def verdict(detail: Mapping[str, Any], width: int) -> list[Content]:
    """All of it, in lines that fit."""
    lines: list[Content] = []
    for title, blocks in (
        ("Why it ended so", list(_cause(detail))),
        ("Reward", list(_reward(detail))),
        ("Trained", list(_trained(detail))),
        ("What became of it", list(_states(detail))),
        ("The task", list(_task(detail))),
        ("The judge", list(_judge(detail, width))),
    ):
        if blocks:
            lines += [Content.styled(title, "bold $primary")]
            lines += [Content.assemble("  ", part) for block in blocks for part in block.wrap(max(width - 2, 2))]
            lines.append(Content(""))
    return lines[:-1]


def _cause(detail: Mapping[str, Any]) -> Iterator[Content]:
    explained = why(detail["cause"])
    _, style = MARKS[detail["state"]]
    if explained:
        what, mend, whose = explained
        yield Content.assemble((detail["state"], f"bold {style}"), f": {what}")
        _, _, more = detail["cause"].partition(":")
        if more.strip():
            yield Content.styled(more.strip(), "$foreground")
        yield Content.assemble(("→ ", "$primary"), mend)
        yield faint(whose)
    elif detail["cause"]:
        yield Content.assemble((detail["state"], f"bold {style}"), f": {detail['cause']}")
    for name in detail["flags"]:
        meaning = flag(name)
        yield Content.assemble(("▲ ", "$warning"), name, (f"  {meaning}" if meaning else "", "$faint"))


def _reward(detail: Mapping[str, Any]) -> Iterator[Content]:
    if detail["reward"] is None:
        yield faint("none yet" if detail["state"] in units.UNFINISHED else "none: it was not graded")
        return
    yield Content.assemble((f"{detail['reward']:.4g}", "bold"))
    wide = max((len(name) for name in detail["breakdown"]), default=0)
    for name, value in detail["breakdown"].items():
        bar = gauge(value, 12, "$accent") if 0 <= value <= 1 else Content(" " * 12)
        yield Content.assemble((f"{name:<{wide}}  ", "$faint"), bar, f"  {value:.4g}")


def _trained(detail: Mapping[str, Any]) -> Iterator[Content]:
    for sample in detail["sample_rows"]:
        yield Content.assemble(
            (f"step {sample['step']}", "bold"),
            f"  {sample['trained_tokens']} of {sample['tokens']} tokens",
            (f"  advantage {sample['advantage']:+.3f}  weight {sample['weight']:.2e} a token", "$faint"),
        )


def _states(detail: Mapping[str, Any]) -> Iterator[Content]:
    states = detail["states"]
    for row, following in zip(states, [*states[1:], None], strict=True):
        mark, style = MARKS[row["state"]]
        took = f"  {units.clock(following['at'] - row['at'])}" if following else ""
        at = time.strftime("%H:%M:%S", time.localtime(row["at"]))
        attempt = f"  attempt {row['attempt']}" if row["attempt"] > 1 else ""
        cause = f"  {row['cause']}" if row["cause"] else ""
        yield Content.assemble(
            (f"{at}  ", "$faint"), (f"{mark} {row['state']:<9}", style), (f"{took}{attempt}{cause}", "$faint")
        )


def _task(detail: Mapping[str, Any]) -> Iterator[Content]:
    for name, value in ((detail["task"] or {}).get("public") or {}).items():
        yield Content.assemble((f"{name}: ", "$faint"), str(value))


def _judge(detail: Mapping[str, Any], width: int) -> Iterator[Content]:
    for call in detail["judge_calls"]:
        took = call["finished_at"] - call["started_at"]
        yield Content.assemble((call["model"], "bold"), (f"  status {call['status']}  {took:.1f} s", "$faint"))
        choices = call["reply"].get("choices") or ()
        answers = [choice["message"] for choice in choices if choice.get("message")]
        for message in [*(call["request"].get("messages") or []), *answers]:
            yield from message_lines(message, width - 2)
        if "error" in call["reply"]:
            yield Content.styled(str(call["reply"]["error"]), "$error")
