import re


def grade(task, rollout, workdir):
    """The right word is worth 1 alone, and less the more words stand around it."""
    words = re.findall(r"[a-z]+", (workdir / "answer.txt").read_text().lower())
    return 1 / len(words) if set(words) & set(task["hidden"]["opposites"]) else 0.0
