"""What happens to pods: no image, no room, no node, evicted, lost, past their time, killed while they start, and left
behind by a supervisor that was killed. Nodes and controllers are those of helpers/cluster.py."""

import asyncio
import subprocess
import sys
import time
import types
from pathlib import Path

import cluster as cluster_module
import pytest
from bench import until
from in_cluster import QUOTA, answering, bench_of, causes, refusing, running

from aglite.doctor import cluster as check_cluster
from aglite.doctor import gateway_address
from aglite.errors import RecipeError
from aglite.rollouts.backends.kube import lease, objects
from aglite.rollouts.backends.kube.manifests import resources

STAND_IN = Path(__file__).parents[1] / "helpers" / "supervisor_stand_in.py"


def name_of(pod):
    return pod["metadata"]["name"]


# images and room


async def test_an_image_that_cannot_be_pulled_is_never_the_agents_fault(tmp_path, cluster):
    async with answering(tmp_path, attempts=2) as bench:
        cluster.kubelet.images.clear()
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.attempt) == ("error", None, 2)
        assert outcome.cause == "image: agent-image: failed to pull image agent-image: not found"
        cluster.kubelet.images.add("agent-image")
        assert (await bench.run()).state == "done"


async def test_an_image_that_the_cluster_has_not_is_refused_before_the_first_rollout(tmp_path, cluster):
    bench = bench_of(tmp_path, image="no-such-image")
    with pytest.raises(RecipeError, match=r"agent.image: the cluster cannot have it: no-such-image"):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


async def test_a_cluster_that_stays_full_is_said(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr("aglite.rollouts.backends.kube.begin.EXPLAIN_S", 0.3)
    pods = "exceeded quota: team, requested: pods=1, used: 5, limited: pods=5"
    nodes = "0/3 nodes are available: 3 Insufficient memory"
    timeout, started = asyncio.timeout, []

    def kept(delay_s):
        made = timeout(delay_s)
        if delay_s == 1000:
            started.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", kept)
    async with answering(tmp_path, attempts=1) as bench:
        backend = bench.launcher._backend
        backend._settings.start_timeout_s = 1000

        async def said(why):
            """What is said when the time to start is up, which it is once the attempt knows why it has not started."""
            task = await bench.submit()
            await until(lambda: any(why in attempt.waits_for for attempt in backend._attempts.values()))
            started[-1].reschedule(0)
            outcome = await task
            assert (outcome.state, outcome.reward) == ("error", None)
            return outcome.cause.removeprefix("backend: not started within 1000 s: ")

        cluster.rules.append(refusing("jobs", times=1000, **QUOTA))
        assert await said(QUOTA["message"]) == QUOTA["message"]
        cluster.rules.clear()
        cluster.pod_refusal = pods
        assert (await said(pods)).endswith(f"is forbidden: {pods}")
        cluster.pod_refusal, cluster.no_node = "", nodes
        assert await said(nodes) == f"no node takes it: {nodes}"
        cluster.no_node = ""


async def test_a_namespace_that_forbids_such_pods_is_the_recipes_mistake(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr("aglite.rollouts.backends.kube.begin.EXPLAIN_S", 0.2)
    async with answering(tmp_path) as bench:
        cluster.pod_refusal = 'violates PodSecurity "restricted:latest": runAsNonRoot != true'
        outcome = await bench.run()
        cluster.pod_refusal = ""
        assert (outcome.state, outcome.attempt) == ("error", 1)
        assert outcome.cause.startswith("recipe: agent.kubernetes: ") and "PodSecurity" in outcome.cause


# pods that go


async def test_an_agent_whose_pod_has_to_go_is_tried_again_unless_that_is_its_own_doing(tmp_path, cluster):
    async with answering(tmp_path, cluster, concurrency=5) as bench:
        tasks = [await bench.submit() for _ in range(5)]
        full, evicted, preempted, deleted, ended = await running(cluster, 5)
        await cluster.evict(name_of(full), 'Usage of EmptyDir volume "rollout" exceeds the limit "512Mi".')
        await cluster.evict(name_of(evicted), "The node was low on resource: memory.")
        cluster.preempt(name_of(preempted))
        cluster.delete("pods", deleted, None)
        cluster.delete("jobs", cluster.server.find("jobs", ended["metadata"]["labels"]["job-name"]), None)
        cluster.let_go()
        outcomes = {task.rollout_id: await task for task in tasks}
        own = outcomes.pop(full["metadata"]["labels"]["aglite.rollout"])
        assert (own.state, own.attempt, own.flags) == ("failed", 1, ["oversize", "ungraded"])
        assert own.cause.startswith('disk: Usage of EmptyDir volume "rollout"')
        for pod, said in (
            (evicted, "lost: Evicted: The node was low"),
            (preempted, "lost: its pod has to go: PreemptionByScheduler"),
            (deleted, "lost: somebody deleted its pod"),
            (ended, "lost: somebody deleted its pod"),
        ):
            rollout_id = pod["metadata"]["labels"]["aglite.rollout"]
            outcome = outcomes[rollout_id]
            assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 2), causes(bench, rollout_id)
            assert causes(bench, rollout_id)[0].startswith(said)


async def test_the_pod_of_a_lost_node_does_not_hold_its_rollout_up_and_is_deleted_by_force(
    tmp_path, cluster, monkeypatch
):
    monkeypatch.setattr(objects, "GONE_S", 2.0)
    async with answering(tmp_path, cluster) as bench:
        task = await bench.submit()
        (pod,) = await running(cluster)
        cluster.lose_node(name_of(pod))
        cluster.let_go()
        outcome = await task
        assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 2)
        (cause,) = causes(bench, task.rollout_id)
        assert cause.startswith("lost: its pod has to go: DeletionByTaintManager")
        await until(lambda: cluster.pods() == [] and cluster.jobs() == [])


async def test_a_grader_whose_pod_is_lost_costs_the_agent_nothing(tmp_path, cluster):
    reward = {"grade": None, "command": ["./check.sh"], "files": ["check.sh"], "result": "json"}
    async with answering_with(tmp_path, reward, cluster) as bench:
        task = await bench.submit()

        def grading():
            pods = cluster.pods()
            return [pod for pod in pods if "grade" in pod["metadata"]["labels"]["aglite.rollout"]]

        await until(grading)
        (pod,) = await until(lambda: [one for one in grading() if one["status"].get("phase") == "Running"])
        await cluster.evict(name_of(pod), "The node was low on resource: memory.")
        cluster.let_go()
        outcome = await task
        assert (outcome.state, outcome.reward, outcome.cause) == ("done", 0.5, "")


def answering_with(tmp_path, reward, cluster):
    bench = bench_of(tmp_path, "print('ran')", reward=reward)
    check = bench.recipe.folder / "check.sh"
    check.write_text(f"#!/bin/sh\nuntil test -e {cluster.gate}; do sleep 0.1; done\necho '{{\"reward\": 0.5}}'\n")
    check.chmod(0o755)
    return bench


# time


class Clock:
    """Goes as time does, but not while this process stands still, as it may for seconds on a busy machine: nobody
    renews a Job or looks at its age meanwhile."""

    def __init__(self):
        self.goes = True
        self._now = self._read = time.monotonic()

    def __call__(self):
        now = time.monotonic()
        self._now += min(now - self._read, 0.5) if self.goes else 0
        self._read = now
        return self._now


@pytest.fixture
def clock(cluster, monkeypatch):
    """Of the cluster's controllers and of leases."""
    clock = Clock()
    for module in (lease, cluster_module):
        times = {"strftime": time.strftime, "gmtime": time.gmtime, "monotonic": clock}
        monkeypatch.setattr(module, "time", types.SimpleNamespace(**times))
    return clock


async def test_jobs_are_renewed_while_aglite_lives_and_end_soon_when_it_does_not(tmp_path, cluster, clock, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 4)
    monkeypatch.setattr(lease, "RENEW_S", 0.5)
    async with answering(tmp_path, cluster, attempts=1) as bench:
        task = await bench.submit()
        await running(cluster)
        end = clock() + 6
        await until(lambda: clock() > end)
        cluster.let_go()
        outcome = await task
        assert (outcome.state, outcome.reward) == ("done", 1.0)
        cluster.gate.unlink()
        bench.launcher._backend._renewing.cancel()
        outcome = await bench.run()
        assert (outcome.state, outcome.cause) == ("error", "lost: its Job could not be renewed for 4 s")


async def test_no_renewal_lets_a_job_live_past_the_deadline(tmp_path, cluster, clock, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 3)
    monkeypatch.setattr(lease, "RENEW_S", 0.5)
    template = resources.files("aglite.rollouts.backends.kube").joinpath("job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(template.replace("{{ deadline_s }}", "4"))
    async with answering(tmp_path, cluster, attempts=1, kubernetes={"job": str(tmp_path / "job.yaml")}) as bench:
        clock.goes = False
        task = await bench.submit()
        await running(cluster)
        clock.goes = True
        outcome = await task
        assert outcome.state == "error"
        assert outcome.cause == "lost: it lasted longer than agent.kubernetes.deadline_s (4 s)"


# ends


async def test_a_rollout_that_is_killed_while_it_starts_leaves_nothing(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        for waits_for in ("quota", "a node", "its image"):
            if waits_for == "quota":
                cluster.pod_refusal = "exceeded quota: team"
            elif waits_for == "a node":
                cluster.no_node = "0/3 nodes are available"
            else:
                cluster.kubelet.may_pull.clear()
            task = await bench.submit()
            await until(cluster.pods if waits_for != "quota" else lambda: cluster.server.all("events"))
            assert bench.launcher.counts()["starting"] == 1
            bench.launcher.kill(task.rollout_id)
            outcome = await task
            assert (outcome.state, outcome.cause, outcome.reward) == ("cancelled", "killed", None)
            await until(lambda: [one.partition("/")[0] for one in cluster.left()] == ["networkpolicies"])
            cluster.pod_refusal = cluster.no_node = ""
            cluster.kubelet.may_pull.set()
        assert (await bench.run()).state == "done"


async def test_deletions_that_are_refused_for_a_while_are_done_all_the_same(tmp_path, cluster):
    busy = {"status": 500, "reason": "InternalError", "message": "etcdserver: request timed out"}
    modified = {"status": 409, "reason": "Conflict", "message": "the object has been modified"}
    async with answering(tmp_path) as bench:
        cluster.rules += [
            refusing("jobs", "DELETE", times=3, **busy),
            refusing("jobs", "DELETE", times=2, **modified),
            refusing("secrets", "DELETE", times=3, **modified),
        ]
        assert (await bench.run()).state == "done"


@pytest.fixture
def killed(tmp_path, cluster):
    """Ends a supervisor and its reaper by SIGKILL in the middle of its rollouts."""

    async def kill():
        section = '{"backend": "kubernetes", "image": "agent-image", "user": "61234:61234"}'
        process = subprocess.Popen([sys.executable, STAND_IN, tmp_path, section])  # noqa: ASYNC220
        try:
            await until(lambda: (tmp_path / "ready").exists(), 150)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)

    return kill


async def test_what_a_killed_supervisor_left_is_swept_at_the_next_start(tmp_path, cluster, killed, monkeypatch):
    """Also the pod of a node that nobody hears of any more; not what is another run's."""
    monkeypatch.setattr(objects, "GONE_S", 2.0)
    (tmp_path / "other").mkdir()
    async with answering(tmp_path / "other", cluster) as other:
        task = await other.submit()
        (theirs,) = await running(cluster)
        await killed()
        left = [job["metadata"]["name"] for job in cluster.jobs()]
        assert len(left) >= 4
        lost = next(pod for pod in await running(cluster, 4) if name_of(pod) != name_of(theirs))
        cluster.lose_node(name_of(lost))
        async with answering(tmp_path) as bench:
            assert [name_of(pod) for pod in cluster.pods()] == [name_of(theirs)]
            assert len(cluster.server.all("secrets")) == 1
            assert (await bench.run()).state == "done"
        assert not task.done()
        other.launcher.kill(task.rollout_id)
        await task


# aglite doctor


@pytest.fixture
def recipe(tmp_path, cluster):
    bench = bench_of(tmp_path)
    bench.store.close()
    return bench.recipe


async def test_doctor_says_what_cluster_a_recipe_would_use(cluster, recipe):
    check = await asyncio.to_thread(check_cluster, recipe)
    assert check.status == "ok", check
    assert f"http://127.0.0.1:{cluster.port}, Kubernetes v1." in check.detail
    assert check.detail.endswith("namespace rollouts, network sealed")
    assert cluster.left() == [], "it changes nothing"


async def test_doctor_names_what_is_missing(cluster, recipe, monkeypatch):
    cluster.forbidden = {"patch jobs", "create pods/exec"}
    check = await asyncio.to_thread(check_cluster, recipe)
    assert check.status == "error" and check.detail.endswith("you may not patch jobs, create pods/exec")
    assert "docs/sandboxes.md" in check.mend
    recipe.agent.kubernetes.context = "elsewhere"
    check = await asyncio.to_thread(check_cluster, recipe)
    assert check.status == "error" and 'namespaces "no-such" not found' in check.detail
    recipe.agent.kubernetes.context = "nowhere"
    check = await asyncio.to_thread(check_cluster, recipe)
    assert check.status == "error" and "nowhere" in check.detail


async def test_doctor_says_that_a_cluster_does_not_answer(cluster, recipe, monkeypatch):
    monkeypatch.setattr("aglite.rollouts.backends.kube.check.PATIENCE_S", 0.3)
    await cluster.stop()
    check = await asyncio.to_thread(check_cluster, recipe)
    assert check.status == "error" and f"no API server answers at http://127.0.0.1:{cluster.port}" in check.detail


def test_doctor_does_not_take_a_pods_own_address_for_the_gateways(recipe):
    check = gateway_address(recipe)
    assert check.status == "error" and "is the pod itself" in check.detail
