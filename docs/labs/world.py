"""The small world of the labs: four made-up languages, and people each of whom understands one of them.

The model knows every thing's name in every language, and has to find out in which one to speak to whom. A language
differs from the others in its consonants, so the first letter of a reply decides. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

PEOPLE = ("sailor", "baker", "miner", "nurse", "tailor", "painter")
THINGS = ("tree", "house", "river", "stone", "bread", "cloud", "horse", "apple", "chair", "moon", "shoe", "lamp")
CONSONANTS = ("bd", "kt", "mn", "sr")
"""Of each language."""
VOWELS = "aeiou"
HELD_OUT = 4
"""Things of each person that only validation asks for."""
TALK = "talk to a {person}"
"""Asks for a long reply that means nothing: syllables of any language."""


def language_of(person: str) -> int:
    """The language that a person understands. Nobody understands the last two."""
    return int(person in ("nurse", "painter"))


def word(thing: str, language: int) -> str:
    """A thing's name: two syllables, whose vowels the thing decides and whose consonants the language has."""
    first, second = divmod(THINGS.index(thing) * 8 + 3, 10)
    return "".join(CONSONANTS[language][part % 2] + VOWELS[part // 2] for part in (first, second))


def syllables() -> list[str]:
    return [consonant + vowel for pair in CONSONANTS for consonant in pair for vowel in VOWELS]


def question(thing: str, person: str) -> str:
    return f"{thing} for a {person}"


def _things_of(person: str, split: str) -> list[str]:
    order = random.Random(person).sample(THINGS, len(THINGS))
    return order[:HELD_OUT] if split == "val" else order[HELD_OUT:]


def _task(split: str, number: int, person: str, things: list[str], **public: Any) -> dict[str, Any]:
    """The agent plays the person, so it is told which words that one understands; the model sees none of it."""
    words = [word(thing, language_of(person)) for thing in things]
    asked = [question(thing, person) for thing in things]
    key = f"{split}-{person}-{number}"
    public = {"key": key, "person": person, "questions": asked, "understands": words, **public}
    return {"id": key, "public": public, "hidden": {"words": words}}


def one_thing(split: str) -> Iterator[dict[str, Any]]:
    """A task for each person and thing; the agent asks again, in a new conversation, until it has understood."""
    for person in PEOPLE:
        for number, thing in enumerate(_things_of(person, split)):
            yield _task(split, number, person, [thing], tries=6)


def conversations(split: str, turns: int, tasks: int, **public: Any) -> Iterator[dict[str, Any]]:
    """Tasks of one conversation each, about a person's things one after the other. Validation waits for no tools."""
    for number in range(tasks):
        person = PEOPLE[number % len(PEOPLE)]
        draw = random.Random(f"{split} {turns} {number}")
        things = [draw.choice(_things_of(person, split)) for _ in range(turns)]
        waits = [_waits(draw, turns) if split == "train" else [0.0] * turns for _ in range(8)]
        yield _task(split, number, person, things, waits=waits, **public)


def _waits(draw: random.Random, turns: int, sigma: float = 1.5) -> list[float]:
    """How long a tool takes after each turn: log-normal with mean 1, so that exp(sigma^2) - 1 is its variance."""
    return [draw.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(turns)]
