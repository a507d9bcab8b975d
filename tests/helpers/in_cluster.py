"""What the tests of the Kubernetes backend share: benches whose agents are pods of cluster.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import Bench, until
from cluster import Cluster, Refusal

IN_CLUSTER = {"backend": "kubernetes", "image": "agent-image", "user": "61234:61234"}
"""The part of an agent section. Nobody else on this machine has that user's number."""

ANSWERS = """
    import os, sys, time
    while sys.argv[1:] and not os.path.exists(sys.argv[1]): time.sleep(0.05)
    open("answer", "w").write(os.environ["AGLITE_ROLLOUT_ID"])
"""
GRADE = "def grade(task, rollout, workdir):\n    return float((workdir / 'answer').read_text() == rollout['id'])\n"

QUOTA = {
    "status": 403,
    "reason": "Forbidden",
    "message": 'jobs.batch "x" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, used: 5, limited: 5',
}


def bench_of(folder: Path, agent: str = "print('ran')", **section: Any) -> Bench:
    return Bench(folder, agent, **{**IN_CLUSTER, **section})


def answering(folder: Path, cluster: Cluster | None = None, **section: Any) -> Bench:
    """Its agents leave the answer that is graded with 1: at once, or with a cluster when that lets them go."""
    section = {"command": ["python", "agent.py", *([str(cluster.gate)] if cluster else [])], **section}
    return bench_of(folder, ANSWERS, grade=GRADE, **section)


def causes(bench: Bench, rollout_id: str) -> list[str]:
    """All that a rollout's states say of why."""
    return [row["cause"] for row in bench.store.rollout_states(rollout_id) if row["cause"]]


async def running(cluster: Cluster, count: int = 1) -> list[dict[str, Any]]:
    """Wait until so many agents run; their pods."""

    def found() -> list[dict[str, Any]]:
        pods = [pod for pod in cluster.pods() if pod["metadata"]["labels"]["aglite.rollout"] != "check"]
        return [
            pod
            for pod in pods
            if any("running" in one["state"] for one in pod["status"].get("containerStatuses", ())[:1])
            and not pod["metadata"].get("deletionTimestamp")
        ]

    return await until(lambda: (pods := found()) and len(pods) >= count and pods, 120)


def refusing(
    plural: str, method: str = "POST", times: int = 1, skip: int = 0, **refusal: Any
) -> Callable[[Any], Exception | None]:
    """A rule that refuses some of the requests for one kind."""
    left = {"skip": skip, "times": times}

    def rule(request: Any) -> Exception | None:
        if request.resource is None or (request.resource.plural, request.method.value) != (plural, method):
            return None
        if left["skip"]:
            left["skip"] -= 1
        elif left["times"]:
            left["times"] -= 1
            return Refusal(**refusal)
        return None

    return rule
