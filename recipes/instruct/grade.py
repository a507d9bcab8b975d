"""What an answer is worth, from 0 to 1.

Form is paid only together with content: an answer of the right shape that says nothing, copies the task, repeats
itself or never ends is worth nothing. That is not pedantry: a model under training finds every such gap in a few steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from words import DETERMINERS, VERB_FORMS

Breakdown = dict[str, float]


def grade(task: dict[str, Any], rollout: dict[str, Any], workdir: str) -> dict[str, Any]:
    """Reward and its parts for the answer that the agent left in `answer.txt`; no answer, or one that was cut, is 0."""
    file = Path(workdir) / "answer.txt"
    answer = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    judge = {"sentence": grade_sentence, "json": grade_json, "list": grade_list}[task["public"]["kind"]]
    breakdown = judge(answer, task["hidden"])
    return {"reward": sum(breakdown.values()), "breakdown": breakdown}


def grade_sentence(answer: str, hidden: dict[str, Any]) -> Breakdown:
    """A real sentence with the word is worth 0.2, short enough another 0.3, with the right mark another 0.5."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", answer.lower().replace("’", "'"))
    task_words = {"sentence", "sentences", "word", "words", "exclamation", "question"}
    one_sentence = len(re.findall(r"[.!?]+(?=\s|$)", answer)) <= 1 and "\n" not in answer
    real = (
        hidden["word"] in words
        and len(words) >= 4
        and len(set(words)) > len(words) // 2  # no stammering
        and one_sentence
        and not task_words & set(words)  # no talk about the task, no copy of it
        and not re.search(r"[<>{}\[\]_*#]|\.\.\.|…", answer)  # no placeholders
        and has_verb(words)
    )
    return {
        "content": 0.2 if real else 0.0,
        "length": 0.3 if real and len(words) <= hidden["most"] else 0.0,
        "mark": 0.5 if real and answer.endswith(hidden["mark"]) else 0.0,
    }


def has_verb(words: list[str]) -> bool:
    """Whether some word looks like a verb in use: a known form, not straight after an article or a possessive."""
    for before, word in zip(["", *words], words, strict=False):
        stem, _, ending = word.partition("'")
        is_short = ending == "s" and stem in ("it", "that", "there", "what", "where", "who", "he", "she", "let")
        if is_short or ending in ("re", "m", "ll", "ve", "d", "t"):
            return True
        if word in VERB_FORMS and before not in DETERMINERS:
            return True
    return False


def grade_json(answer: str, hidden: dict[str, Any]) -> Breakdown:
    """Name and age right is worth 0.6, the age as a number another 0.2, nothing besides them another 0.2.

    The right name with a wrong age is worth 0.1: enough to lead there, too little to live on.
    """
    found, alone = first_object(answer)
    name = isinstance(found.get("name"), str) and found["name"].strip().lower() == hidden["name"].lower()
    age = str(found.get("age")).strip() == str(hidden["age"])
    right = name and age
    return {
        "content": 0.6 if right else 0.1 if name else 0.0,
        "number": 0.2 if right and type(found["age"]) is int else 0.0,
        "alone": 0.2 if right and alone and set(found) == {"name", "age"} else 0.0,
    }


def first_object(answer: str) -> tuple[dict[str, Any], bool]:
    """The first JSON object in `answer` ({} if there is none), and whether the answer is nothing else."""
    start = answer.find("{")
    try:
        found, end = json.JSONDecoder().raw_decode(answer, max(start, 0))
    except (ValueError, RecursionError):
        return {}, False
    return (found, found_alone(answer, start, end)) if isinstance(found, dict) else ({}, False)


def found_alone(answer: str, start: int, end: int) -> bool:
    return not (answer[:start] + answer[end:]).strip()


def grade_list(answer: str, hidden: dict[str, Any]) -> Breakdown:
    """The share of the asked-for things that are there, halved unless the answer is just them, with commas between.

    Too many things, one thing twice or fewer than half of them right is worth nothing.
    """
    count, members = hidden["count"], {singular(member) for member in hidden["members"]}
    form = not re.search(r"[\n:;\d]", answer) and answer.count(",") == count - 1
    items = [tidy(part) for part in re.split(r"[,\n;]", answer.rpartition(":")[2]) if tidy(part)]
    right = [item for item in items if item in members]
    if len(items) > count or len(set(items)) < len(items) or 2 * len(right) < count:
        return {"content": 0.0, "form": 0.0}
    half = 0.5 * len(right) / count
    return {"content": half, "form": half if form and len(items) == count else 0.0}


def tidy(part: str) -> str:
    """One item of a list without numbering, article and plural, to compare."""
    text = re.sub(r"^[\s\d.)*•-]+", "", part.strip().lower()).strip(" .!")
    return singular(re.sub(r"^(and |or )?(an? |the )?", "", text))


def singular(word: str) -> str:
    """A rough singular: only used to compare, on both sides alike."""
    for ending, instead in (("ies", "y"), ("oes", "o"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x")):
        if word.endswith(ending):
            return word[: -len(ending)] + instead
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word
