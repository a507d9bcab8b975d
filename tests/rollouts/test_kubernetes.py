"""What a cluster does to rollouts, over HTTP: an API server that refuses, forgets, breaks off and dies, nodes that are
full, lost or evict. The API is kmock's, the node is of these tests (helpers/cluster.py): no real kubelet, scheduler or
network."""

import asyncio
import json

import pytest
from bench import Bench, until
from cluster import Refusal
from in_cluster import GRADE, IN_CLUSTER, QUOTA, answering, bench_of, causes, refusing, running

from aglite.errors import RecipeError
from aglite.rollouts.backends.kube import api as api_module

# what a pod is given


async def test_the_attempts_keys_come_from_a_secret_and_stand_nowhere_else(tmp_path, cluster):
    agent = f"""
        import os, time
        print(os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"])
        while not os.path.exists({str(cluster.gate)!r}): time.sleep(0.05)
    """
    async with bench_of(tmp_path, agent, url="http://127.0.0.1:4321") as bench:
        task = await bench.submit()
        (pod,) = await running(cluster)
        token = bench.gateway.open[task.rollout_id].token
        (job,) = [job for job in cluster.jobs() if "check" not in job["metadata"]["name"]]
        (secret,) = cluster.server.all("secrets")
        assert token not in json.dumps([pod, job])
        assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        labels = {name: job["metadata"]["labels"][name] for name in ("aglite.rollout", "aglite.attempt", "aglite.role")}
        assert labels == {"aglite.rollout": task.rollout_id, "aglite.attempt": "1", "aglite.role": "agent"}
        bench.last = task.rollout_id
        cluster.let_go()
        assert (await task).state == "done"
        assert bench.log() == f"{token} http://127.0.0.1:4321/rollouts/{task.rollout_id}/v1\n"
        assert bench.store.meta("sandbox")["kubernetes"].startswith("v1.")


async def test_the_policy_is_there_before_any_job_and_goes_with_the_run(tmp_path, cluster):
    async with bench_of(tmp_path) as bench:
        (policy,) = cluster.server.all("networkpolicies")
        made = [
            plural for method, plural, _ in cluster.seen if method == "POST" and plural != "selfsubjectaccessreviews"
        ]
        assert made.index("networkpolicies") < made.index("jobs")
        assert (await bench.run()).state == "done"
        (rule,) = policy["spec"]["egress"]
        assert rule["to"] == [{"ipBlock": {"cidr": "127.0.0.1/32"}}]
    assert cluster.server.all("networkpolicies") == []


async def test_an_open_network_has_no_policy(tmp_path, cluster):
    async with bench_of(tmp_path, network="open"):
        assert cluster.server.all("networkpolicies") == []


# commands that grade


CHECKS = """#!/bin/sh
echo noise
test "$(cat task.txt)" = "$(cat ../work/answer)" && test "$(readlink ../work/link)" = answer || exit 3
echo '{"reward": 0.75}'
"""


def graded_by_command(tmp_path, agent, command, **section):
    reward = {"grade": None, "command": command, "files": ["task.txt"], "result": "json"}
    bench = Bench(tmp_path, agent, reward=reward, **{**IN_CLUSTER, **section})
    (bench.recipe.folder / "task.txt").write_text("42")
    (bench.recipe.folder / "check.sh").write_text(CHECKS)
    (bench.recipe.folder / "check.sh").chmod(0o755)
    return bench


async def test_a_command_grades_in_a_pod_of_its_own_beside_what_the_agent_left(tmp_path, cluster):
    agent = "import os; open('answer', 'w').write('42'); os.symlink('answer', 'link'); os.mkfifo('pipe')"
    async with graded_by_command(tmp_path, agent, ["./check.sh"]) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 0.75, ["special_files"]), bench.log()
        assert "--- grader ---\nnoise\n" in bench.log()
        made = [path for method, plural, path in cluster.seen if (method, plural) == ("POST", "jobs")]
        assert len(made) == 3, "the check, the agent, the grader"


async def test_a_commands_program_that_the_image_has_not_is_refused_at_the_start(tmp_path, cluster):
    bench = graded_by_command(tmp_path, "", ["no-such"])
    with pytest.raises(RecipeError, match=r"reward.command: agent-image has no program 'no-such'"):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


# an API server that is not at its best


async def test_a_watch_that_has_expired_begins_anew(tmp_path, cluster):
    async with answering(tmp_path, cluster, concurrency=2) as bench:
        tasks = [await bench.submit() for _ in range(2)]
        await running(cluster, 2)
        for _ in range(3):
            watches = cluster.watches
            cluster.expire()
            await until(lambda: cluster.watches > watches)  # noqa: B023 (it is over within this turn)
        cluster.let_go()
        outcomes = await asyncio.gather(*tasks)
        assert {(one.state, one.reward, one.attempt) for one in outcomes} == {("done", 1.0, 1)}


async def test_a_quiet_cluster_is_not_taken_for_one_that_is_away(tmp_path, cluster, monkeypatch, caplog):
    monkeypatch.setattr(api_module, "SILENCE_S", 0.7)
    async with answering(tmp_path, cluster) as bench:
        task = await bench.submit()
        await running(cluster)
        watches = cluster.watches
        await until(lambda: cluster.watches >= watches + 2)
        cluster.let_go()
        outcome = await task
        assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 1)
        assert "lost the connection" not in caplog.text


async def test_what_ended_while_the_watch_was_cut_off_is_seen(tmp_path, cluster):
    """Changes and deletions between two lists: the second list is all that tells of them."""
    async with answering(tmp_path, cluster, concurrency=2, attempts=2) as bench:
        tasks = [await bench.submit() for _ in range(2)]
        pods = await running(cluster, 2)
        cluster.rules.append(lambda request: Refusal(status=410) if request.params.get("watch") else None)
        cluster.end_watches.set()
        await until(lambda: len(cluster.pods()) >= 2 and cluster.watches)
        gone, ended = (pod["metadata"]["name"] for pod in pods)
        cluster.server.drop("pods", gone)
        cluster.let_go()
        await until(lambda: cluster.agent_has_ended(ended))
        cluster.end_watches.clear()
        cluster.rules.clear()
        outcomes = await asyncio.gather(*tasks)
        assert {(one.state, one.reward) for one in outcomes} == {("done", 1.0)}
        assert sorted(one.attempt for one in outcomes) == [1, 2]


async def test_rollouts_survive_an_api_server_that_dies_and_comes_back(tmp_path, cluster):
    """Agents run on meanwhile; nobody is launched a second time."""
    async with answering(tmp_path, cluster, concurrency=3) as bench:
        tasks = [await bench.submit() for _ in range(5)]
        pods = await running(cluster, 3)
        await cluster.stop()
        await asyncio.sleep(1)
        cluster.let_go()
        await until(lambda: all(cluster.agent_has_ended(pod["metadata"]["name"]) for pod in pods))
        await asyncio.sleep(1)
        await cluster.start()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 240)
        assert {(one.state, one.reward, one.attempt) for one in outcomes} == {("done", 1.0, 1)}


async def test_an_api_server_that_stays_away_costs_attempts_and_says_so(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(api_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(api_module.Api.call, "__kwdefaults__", {"patience_s": 1.0, "content_type": "application/json"})
    async with answering(tmp_path, attempts=5) as bench:
        await cluster.stop()
        task = await bench.submit()
        await until(lambda: any("backend: Kubernetes" in cause for cause in causes(bench, task.rollout_id)))
        await cluster.start()
        outcome = await task
        assert (outcome.state, outcome.reward) == ("done", 1.0) and outcome.attempt > 1


async def test_a_creation_whose_answer_got_lost_is_not_done_twice(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        cluster.lose_answers = 1
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt, cluster.lose_answers) == ("done", 1, 0)
        made = [row for row in cluster.server.journal if row[1:3] == ("jobs", "ADDED") and "check" not in str(row[3])]
        assert len(made) == 1


async def test_a_name_that_is_taken_by_somebody_else_is_cleared(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        run = bench.launcher._backend._run
        start = bench.launcher._backend.start

        async def start_late(launch):
            name = run.name(launch.rollout_id, launch.attempt)
            labels = {"aglite.run": run.id, "aglite.supervisor": "an-earlier-one"}
            cluster.server.add("secrets", {"kind": "Secret", "metadata": {"name": name, "labels": labels}})
            return await start(launch)

        bench.launcher._backend.start = start_late
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 1)


async def test_full_servers_and_overload_are_waited_for(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        cluster.rules += [
            refusing("secrets", times=2, status=429, reason="TooManyRequests", message="later"),
            refusing("jobs", times=2, status=503, reason="ServiceUnavailable", message="starting"),
            refusing("jobs", times=2, **QUOTA),
            refusing("jobs", times=1, status=409, reason="Conflict", message="the object has been modified"),
        ]
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("done", 1)


async def test_logs_and_files_come_whole_over_connections_that_break(tmp_path, cluster):
    agent = """
        import os, time
        for n in range(20):
            print(n, flush=True)
            time.sleep(0.05)
        open("answer", "w").write(os.environ["AGLITE_ROLLOUT_ID"])
        open("more", "wb").write(os.urandom(300_000))
    """
    grade = GRADE + "    assert (workdir / 'more').stat().st_size == 300_000\n"
    async with Bench(tmp_path, agent, grade=grade, **IN_CLUSTER) as bench:
        cluster.kubelet.break_logs, cluster.kubelet.break_exec = 3, 2
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 1)
        assert bench.log().split() == [str(n) for n in range(20)]
        assert (cluster.kubelet.break_logs, cluster.kubelet.break_exec) == (0, 0)


async def test_a_token_that_has_expired_is_read_anew(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(api_module, "RECONNECT_S", 0.0)
    valid = {"token": "t0ken"}

    def rule(request):
        ok = request._raw_request.headers.get("Authorization") == f"Bearer {valid['token']}"
        return None if ok else Refusal(status=401, reason="Unauthorized", message="expired")

    cluster.rules.append(rule)
    async with answering(tmp_path) as bench:
        valid["token"] = "new"
        cluster.kubeconfig.write_text(cluster.kubeconfig.read_text().replace("t0ken", "new"))
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("done", 1)


async def test_a_token_that_expires_while_an_agent_runs_costs_nothing_that_it_leaves(tmp_path, cluster, monkeypatch):
    """The first to notice may be who fetches it; and the configuration may be being written just then."""
    monkeypatch.setattr(api_module, "RECONNECT_S", 0.0)
    valid, whole = {"token": "t0ken"}, cluster.kubeconfig.read_text()

    def rule(request):
        ok = request._raw_request.headers.get("Authorization") == f"Bearer {valid['token']}"
        return None if ok else Refusal(status=401, reason="Unauthorized", message="expired")

    async with answering(tmp_path, cluster) as bench:
        task = await bench.submit()
        (pod,) = await running(cluster)
        cluster.rules.append(rule)
        valid["token"] = "new"
        cluster.kubeconfig.write_text("{")
        cluster.let_go()
        await until(lambda: cluster.agent_has_ended(pod["metadata"]["name"]))
        await asyncio.sleep(2)
        assert not task.done()
        cluster.kubeconfig.write_text(whole.replace("t0ken", "new"))
        outcome = await task
        assert (outcome.state, outcome.reward, outcome.attempt) == ("done", 1.0, 1)


async def test_a_creation_that_clears_its_way_may_be_refused_as_any_other(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        cluster.rules += [
            refusing("jobs", status=409, reason="AlreadyExists", message="there is one"),
            refusing("jobs", "GET", status=403, reason="Forbidden", message="no looking"),
        ]
        outcome = await bench.run()
        assert outcome.cause.startswith("recipe: agent.backend: the cluster does not allow a Job: no looking"), outcome


async def test_a_page_that_is_no_answer_is_asked_for_again(tmp_path, cluster, monkeypatch):
    """Proxies have pages of their own, and give them with status 200."""
    parsed, pages = api_module._parsed, iter([b"<html>", b"[]"])
    monkeypatch.setattr(api_module, "_parsed", lambda data: parsed(next(pages, data)))
    async with answering(tmp_path) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("done", 1)


# nodes


async def test_a_namespace_without_room_for_pods_is_waited_for(tmp_path, cluster):
    async with answering(tmp_path) as bench:
        cluster.pod_refusal = "exceeded quota: team, requested: pods=1, used: 5, limited: pods=5"
        task = await bench.submit()
        await until(lambda: any(one["reason"] == "FailedCreate" for one in cluster.server.all("events")))
        cluster.pod_refusal = ""
        outcome = await task
        assert (outcome.state, outcome.attempt) == ("done", 1)
