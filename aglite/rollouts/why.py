"""What the causes and flags of rollouts mean, and what can be done about them, in words."""

from __future__ import annotations

from aglite.rollouts.causes import Kind, kind_of

CAUSES: dict[str, tuple[str, str]] = {
    # code: (what happened, what to do about it)
    "exit": (
        "the agent program ended with a non-zero exit code",
        "its output says why; some harnesses do so though done",
    ),
    "signal": (
        "the agent was ended by a signal that aglite did not send",
        "its output may say why: a crash, or the kernel",
    ),
    "wall_time": (
        "its time was up",
        "raise agent.limits.wall_s, or give it less to do; time held by updates is not counted",
    ),
    "calls": (
        "it had made all the model calls it may",
        "raise agent.limits.calls, or see in its messages what it repeats",
    ),
    "sampled_tokens": (
        "it had sampled all the tokens it may",
        "raise agent.limits.sampled_tokens, or ask for shorter replies",
    ),
    "request_bytes": (
        "a request of it was longer than it may be",
        "raise agent.limits.request_bytes, or see what it sends",
    ),
    "memory": ("it wanted more memory than it may have", "raise agent.limits.memory_mb"),
    "disk": ("it filled the disk it was given", "raise agent.limits.disk_mb"),
    "flagged": ("a suspicious sign counts as failure by the recipe", "see its flags, and reward.on_flag in the recipe"),
    "engine": ("the engine did not answer its last call", "it is tried again; see the events and logs/worker.log"),
    "launch": ("this machine could not start it", "it is tried again; look at free memory, processes and disk"),
    "image": ("its image is not there", "pull or build it: images/build.sh makes aglite's own; then `a` tries again"),
    "backend": ("the place where agents run did not answer or refused", "it is tried again; see `aglite doctor`"),
    "lost": (
        "its container, node or files went away",
        "it is tried again; if it recurs, look at the engine and the disk",
    ),
    "grader": (
        "the grader raised, hung or gave no number, twice",
        "correct the grader: `aglite run RECIPE --task ID` tries it",
    ),
    "recipe": ("the recipe names something that is not there", "correct it; `aglite run RECIPE --task ID` tries it"),
    "killed": ("a person ended it", "`a` launches it again while its group waits for others"),
    "quarantined": ("a person left it, or its task, out of the training", "`Z` takes the task again"),
    "stopped": ("the run was stopped", "it is launched again when the run goes on"),
}

KINDS: dict[Kind, str] = {
    "policy": "the agent's own doing: it is graded all the same, and trained",
    "infrastructure": "not the agent's fault: it has no reward and is not trained",
    "cancelled": "no result: it has no reward and is not trained",
}

FLAGS: dict[str, str] = {
    "no_calls": "it never asked the model",
    "log_cut": "its output was longer than agent.limits.log_bytes; the middle is left out",
    "stragglers": "processes of it went on after its end and were ended",
    "stale": "its tokens were too old to be trained (algorithm.max_staleness); it stayed in the baseline",
    "rolled_back": "its step was undone when the run went back to a checkpoint",
    "pruned": "what was said was removed, as the recipe's retention wants it",
    "touched_tests": "it changed files that the grader's tests own",
    "outside_paths": "it changed files outside reward.paths",
    "symlinks": "it left links that lead out of its folder",
    "special_files": "it left pipes, sockets, devices or what cannot be read",
    "oversize": "it left more than is copied for the grader; the rest is left out",
    "network": "it tried to reach something beyond its sealed network",
    "read_git": "the model asked to look into git's history or internals",
    "ungraded": "the grader raised, hung or gave no number on what it left; its log says why",
    "flaky": "repeated gradings of it did not agree",
    "grader_timeout": "the command or the tests did not end in time",
    "grader_memory": "the command or the tests took more memory than their container has",
}


def why(cause: str) -> tuple[str, str, str] | None:
    """Of a rollout's cause as the store has it: what happened, what to do, and whose it is; None for none known."""
    code = cause.partition(":")[0]
    kind = kind_of(code)
    if kind is None:
        return None
    return (*CAUSES[code], KINDS[kind])


def flag(name: str) -> str:
    """What a flag means; '' for one that speaks for itself."""
    if name.startswith("limit:"):
        return f"it reached agent.limits.{name.removeprefix('limit:')}"
    return FLAGS.get(name, "")
