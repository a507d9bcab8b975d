import json


def grade(task, rollout, workdir):
    """Of several things, the share that was understood; of one, 1 / the number of tries that it took."""
    replies, words = json.loads((workdir / "replies.json").read_text()), task["hidden"]["words"]
    if "tries" in task["public"]:
        return 1 / len(replies) if replies[-1] == words[0] else 0.0
    return sum(reply.strip() == word for reply, word in zip(replies, words, strict=True)) / len(words)
