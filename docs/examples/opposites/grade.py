def grade(task, rollout, workdir):
    answer = (workdir / "answer.txt").read_text().strip(" .!\n").lower()
    if answer in task["hidden"]["opposites"]:
        return 1.0
    return 0.3 if any(word in answer.split() for word in task["hidden"]["opposites"]) else 0.0
