"""What an answer is worth: 1 for the right number in the form that was asked for, 0.1 for the form alone, else 0.

The last line has to be `Answer: NUMBER`, one number and nothing else, and there may be no other such line: whoever
lists several numbers has not decided. Only that number counts: not what the tool said, nor what the problem says.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

FORM = 0.1
"""Enough to lead there, too little to live on."""

ANSWER = re.compile(r"^[ \t]*\**answer\**[ \t]*:", re.IGNORECASE | re.MULTILINE)
NUMBER = re.compile(
    r"\**answer\**[ \t]*:[ \t]*\**[ \t]*\$?(-?\$?[\d,]*\.?\d+)[ \t]*(?:%|dollars?)?\.?\**", re.IGNORECASE
)


def grade(task: dict[str, Any], rollout: dict[str, Any], workdir: str) -> dict[str, Any]:
    """Reward and its parts for the reply that the agent left in `answer.txt`; no reply, or one that was cut, is 0."""
    file = Path(workdir) / "answer.txt"
    answer = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    found = final_number(answer)
    right = found is not None and found == Decimal(task["hidden"]["answer"])
    breakdown = {"form": FORM if found is not None else 0.0, "number": 1 - FORM if right else 0.0}
    return {"reward": sum(breakdown.values()), "breakdown": breakdown}


def final_number(answer: str) -> Decimal | None:
    """The number that the answer decides on; None if it does not."""
    if len(ANSWER.findall(answer)) != 1:
        return None
    match = NUMBER.fullmatch(answer.splitlines()[-1].strip())
    if match is None:
        return None
    digits = match[1].replace("$", "")
    if "," in digits and not re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", digits):
        return None  # commas between thousands only: "3,4" is two numbers
    return Decimal(digits.replace(",", ""))
