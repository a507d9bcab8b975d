"""Word problems: GSM8K from the Hugging Face hub, or the sample that lies beside this file.

    {"id": "train-00017", "public": {"question": "..."}, "hidden": {"answer": "72"}}

GSM8K (Cobbe et al. 2021, MIT licence) has 7,473 problems to train on and 1,319 to test with. The sample was written for
this recipe in the same form and holds none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DATASET = ("openai/gsm8k", "main")
SAMPLE = Path(__file__).with_name("sample.jsonl")
HELD_OUT = 3
"""One row in so many of the sample is for validation."""


def train() -> Iterator[Row]:
    """GSM8K's problems to train on."""
    return rows("train", from_hub("train"))


def val() -> Iterator[Row]:
    """GSM8K's problems to test with."""
    return rows("val", from_hub("test"))


def sample_train() -> Iterator[Row]:
    """Two thirds of the sample."""
    return rows("train", (row for place, row in enumerate(sample()) if place % HELD_OUT))


def sample_val() -> Iterator[Row]:
    """The rest of the sample."""
    return rows("val", (row for place, row in enumerate(sample()) if not place % HELD_OUT))


def rows(split: str, problems: Iterable[Row]) -> Iterator[Row]:
    """Tasks of problems in GSM8K's form: {"question", "answer"}, whose answer ends with a line `#### NUMBER`."""
    for number, problem in enumerate(problems):
        answer = solution(problem["answer"])
        yield {
            "id": f"{split}-{number:05d}",
            "public": {"question": problem["question"]},
            "hidden": {"answer": answer},
        }


def solution(answer: str) -> str:
    """The number after `####`, without commas. Raises ValueError where there is none."""
    found = re.fullmatch(r".*\n?####\s*(-?[\d,]+(?:\.\d+)?)\s*", answer, re.DOTALL)
    if found is None:
        raise ValueError(f"no line '#### NUMBER' at the end of {answer[-80:]!r}")
    return found[1].replace(",", "")


def sample() -> list[Row]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines() if line.strip()]


def from_hub(split: str) -> Iterable[Row]:
    try:
        from datasets import load_dataset

        return load_dataset(*DATASET, split=split)
    except Exception as error:  # of many kinds: no network, no such package, a hub that is down
        raise SystemExit(
            f"{DATASET[0]} cannot be had ({type(error).__name__}: {error}); without a network, use the sample: --set "
            "tasks.train=tasks.py:sample_train --set tasks.val=tasks.py:sample_val"
        ) from None
