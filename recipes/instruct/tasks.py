"""Tasks of three kinds, made by code: a sentence with a given word, JSON out of a sentence, a list of things.

    {"id": "train-0001", "public": {"kind", "instruction", ...}, "hidden": {...}}

The agent gets the public part: the instruction and what its own checker needs. The hidden part is for the grader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from words import CATEGORIES, DOINGS, NAMES, WORDS

Row = dict[str, Any]

SEEDS = {"train": 1, "val": 2}
ROWS = {"train": 360, "val": 120}


def train() -> Iterator[Row]:
    """Training tasks; the kinds take turns."""
    return _rows("train")


def val() -> Iterator[Row]:
    """Held-out tasks: other words, other names, other categories."""
    return _rows("val")


def _rows(split: str) -> Iterator[Row]:
    rng = random.Random(SEEDS[split])
    makers = [_sentences(split, rng), _people(split, rng), _lists(split, rng)]
    for number in range(ROWS[split]):
        public, hidden = next(makers[number % len(makers)])
        yield {"id": f"{split}-{number:04d}", "public": public, "hidden": hidden}


def _shuffled(things: list[Any], rng: random.Random) -> Iterator[Any]:
    """All of `things` in a random order, then all of them in another, and so on."""
    while True:
        yield from rng.sample(things, len(things))


def _sentences(split: str, rng: random.Random) -> Iterator[tuple[Row, Row]]:
    for word in _shuffled(WORDS[split], rng):
        most = rng.randint(8, 12)
        mark, its_name = rng.choice([("!", "an exclamation mark"), ("?", "a question mark")])
        instruction = f'Write one sentence with the word "{word}", at most {most} words. End it with {its_name}.'
        public = {"kind": "sentence", "instruction": instruction, "word": word, "most": most, "mark": mark}
        yield public, {"word": word, "most": most, "mark": mark}


def _people(split: str, rng: random.Random) -> Iterator[tuple[Row, Row]]:
    doings = _shuffled(DOINGS[split], rng)
    for name in _shuffled(NAMES[split], rng):
        age, doing = rng.randint(18, 79), next(doings)
        told = rng.choice([f"{name}, {age}, {doing}.", f"{name} is {age} and {doing}.", f"At {age}, {name} {doing}."])
        instruction = f'{told} Give a JSON object with "name" and "age", nothing else.'
        yield {"kind": "json", "instruction": instruction}, {"name": name, "age": age}


def _lists(split: str, rng: random.Random) -> Iterator[tuple[Row, Row]]:
    pairs = [(name, count) for name in CATEGORIES[split] for count in (3, 4, 5)]
    for name, count in _shuffled(pairs, rng):
        public = {"kind": "list", "instruction": f"Name {count} {name}, separated by commas.", "count": count}
        yield public, {"count": count, "members": CATEGORIES[split][name]}
