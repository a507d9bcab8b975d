"""The parts of the Kubernetes backend that need no cluster."""

import asyncio
import io
import subprocess
import sys
import tarfile
import types

import pytest
from cluster import wrong_fields

from aglite.config import Limits, parse_recipe
from aglite.errors import RecipeError
from aglite.redact import Redactor
from aglite.rollouts.backends import Launch
from aglite.rollouts.backends.kube import begin
from aglite.rollouts.backends.kube.attempt import Attempt
from aglite.rollouts.backends.kube.exec import TAKE
from aglite.rollouts.backends.kube.logs import Stamped
from aglite.rollouts.backends.kube.manifests import Gateway, Run, Templates, gateway_of, secret_of
from aglite.rollouts.backends.kube.pods import look
from aglite.rollouts.backends.unpack import unpack
from aglite.rollouts.causes import BackendError

RUN = Run("0123456789", "5uperv1sor", "rollouts", Gateway("", ("10.0.0.5",), 8443))


def recipe(tmp_path, gateway=None, **agent):
    section = {"command": ["python", "agent.py"], "backend": "kubernetes", "image": "registry/agent:1", **agent}
    return parse_recipe(
        {
            "name": "x",
            "model": "m",
            "tasks": {"train": "t.jsonl", "val": "v.jsonl"},
            "agent": section,
            "reward": {"grade": "grade.py:grade"},
            "gateway": {"public_url": "http://10.0.0.5:8443"} if gateway is None else gateway,
        },
        tmp_path / "recipe.yaml",
    )


def launch(tmp_path, **more):
    given = {
        "rollout_id": "r-0a1b2c3d4e",
        "attempt": 2,
        "command": ["python", "agent.py", 'it\'s {{ 7 * 7 }} "so"\n'],
        "files": [],
        "home_files": {},
        "stdin": "",
        "task": {},
        "env": {"OPENAI_API_KEY": "k3y", "NOTE": "- {a: *b}"},
        "limits": Limits(memory_mb=512, disk_mb=64, cpus=1.5),
        "log": tmp_path / "log",
        "redactor": Redactor(()),
        **more,
    }
    return Launch(**given)


# manifests


@pytest.mark.parametrize("network", ["sealed", "open"])
@pytest.mark.parametrize("name", ["", "gpu.example.org"])
def test_the_objects_are_what_the_api_knows_and_hold_nothing_secret_but_the_secret(tmp_path, network, name):
    run = Run("0123456789", "5", "rollouts", Gateway(name, ("10.0.0.5", "fd00::5"), 8443))
    templates, one = Templates(recipe(tmp_path, network=network)), launch(tmp_path)
    job, policy, secret = templates.job(one, run), templates.policy(run), secret_of(one, run)
    assert [wrong_fields(thing) for thing in (job, policy, secret)] == [[], [], []]
    assert "k3y" not in str(job) and "azN5" not in str(job)
    assert secret["data"]["OPENAI_API_KEY"] == "azN5"
    pod = job["spec"]["template"]["spec"]
    agent = next(one for one in pod["containers"] if one["name"] == "agent")
    assert agent["command"][-3:] == one.command
    assert agent["resources"]["limits"] == {"memory": "512Mi", "cpu": "1.5"}
    assert job["metadata"]["labels"] == job["spec"]["template"]["metadata"]["labels"]
    assert job["metadata"]["labels"]["aglite.run"] == policy["spec"]["podSelector"]["matchLabels"]["aglite.run"]
    assert (pod.get("dnsPolicy") == "None") == (network == "sealed")
    assert [alias["ip"] for alias in pod.get("hostAliases") or ()] == (["10.0.0.5", "fd00::5"] if name else [])
    (rule,) = policy["spec"]["egress"]
    assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == ["10.0.0.5/32", "fd00::5/128"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8443}]


def test_a_pod_of_ours_keeps_to_the_restricted_standard(tmp_path):
    pod = Templates(recipe(tmp_path)).job(launch(tmp_path), RUN)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["initContainers"], *pod["containers"]]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kind: Job", "kind: Pod", "it makes no Job"),
        ("name: files-out", "name: other", "it has no container files-out"),
        ("backoffLimit: 0", "backoffLimit: 3", "it may start an attempt again"),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "it may start an attempt again"),
        ("restartPolicy: Never", "restartPolicy: Never\n      hostPID: true", "processes that are not its own"),
        ("{{ deadline_s }}", "soon", "no whole number"),
        ("{{ gid }}", "{{ group }}", "'group' is undefined"),
        ("{{ gid }}", "{{ gid", "line "),
        ("spec:", "spec: [", "agent.kubernetes.job: "),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path, old, new, said):
    from aglite.rollouts.backends.kube import manifests

    text = manifests.resources.files(manifests.__package__).joinpath("job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(RecipeError) as refused:
        Templates(recipe(tmp_path, kubernetes={"job": "job.yaml"})).job(launch(tmp_path), RUN)
    assert said in refused.value.message and "agent.kubernetes.job" in refused.value.message


def test_names_and_labels_are_aglites_whatever_a_template_says(tmp_path):
    from aglite.rollouts.backends.kube import manifests

    text = manifests.resources.files(manifests.__package__).joinpath("job.yaml").read_text()
    mine = "metadata:\n  name: mine\n  namespace: other\n  labels: {team: a, aglite.run: forged}\nspec:"
    text = text.replace("metadata:\n  name: {{ name | tojson }}\nspec:", mine)
    (tmp_path / "job.yaml").write_text(text)
    job = Templates(recipe(tmp_path, kubernetes={"job": "job.yaml"})).job(launch(tmp_path), RUN)
    metadata = job["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("aglite-0123456789-r-0a1b2c3d4e-2", "rollouts")
    assert (metadata["labels"]["team"], metadata["labels"]["aglite.run"]) == ("a", "0123456789")


def test_names_are_short_and_differ():
    long = [RUN.name(f"r-0a1b2c3d4e.1.grade.0.{n}" + "x" * 40, 1) for n in range(3)]
    assert len(set(long)) == 3 and max(map(len, long)) <= 52
    assert RUN.name("r-0a1b2c3d4e.1.grade.0.1", 1) == "aglite-0123456789-r-0a1b2c3d4e-1-grade-0-1-1"


@pytest.mark.parametrize(
    ("agent", "gateway", "said"),
    [
        ({"image": None}, None, "agent.image: missing; kubernetes needs"),
        ({}, {}, "gateway.public_url: missing"),
        ({"kubernetes": {"deadline_s": 400}}, None, "agent.kubernetes.deadline_s: 400 is less"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path, agent, gateway, said):
    with pytest.raises(RecipeError, match=said):
        recipe(tmp_path, gateway, **agent)


@pytest.mark.parametrize(("env", "said"), [({"A B": "x"}, "no variable 'A B'"), ({"A": "x" * (1 << 21)}, "2,097,152")])
def test_an_environment_that_no_secret_holds_is_refused(tmp_path, env, said):
    with pytest.raises(RecipeError, match=said):
        secret_of(launch(tmp_path, env=env), RUN)


def test_the_gateways_address_is_looked_up_here():
    assert gateway_of("https://10.1.2.3") == Gateway("", ("10.1.2.3",), 443)
    named = gateway_of("http://localhost:80")
    assert named.name == "localhost" and named.is_loopback
    with pytest.raises(RecipeError, match="cannot be looked up from here"):
        gateway_of("http://no-such-host.invalid:80")


# what the status of a pod means


def pod(agent=None, files=None, out=None, image="i", **status):
    def container(name, state):
        return {"name": name, "image": image, "state": state or {"waiting": {"reason": "PodInitializing"}}}

    return {
        "metadata": {"name": "p", **status.pop("metadata", {})},
        "status": {
            "initContainerStatuses": [container("files-in", files)],
            "containerStatuses": [container("agent", agent), container("files-out", out)],
            **status,
        },
    }


def ended(code, reason="Error", **more):
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ({"metadata": {"name": "p"}, "status": {}}, "pending"),
        (pod(phase="Pending"), "pending"),
        (pod(files={"running": {}}), "files"),
        (pod(files=ended(0, "Completed")), "filled"),
        (pod(files=ended(0), agent={"waiting": {"reason": "ErrImagePull", "message": "try"}}), "filled"),
        (pod(files=ended(0), agent={"running": {}}, phase="Running"), "running"),
    ],
)
def test_how_far_a_pod_is(given, stage):
    assert look(given, Limits()).stage == stage


def test_what_a_pod_waits_for_is_said():
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    assert look(pod(conditions=[unscheduled]), Limits()).waits_for == "no node takes it: 0/3 nodes"


@pytest.mark.parametrize(
    ("agent", "status", "code", "cause"),
    [
        (ended(0, "Completed"), {}, 0, None),
        (ended(3), {}, 3, None),
        (ended(139), {}, -11, None),
        (ended(137), {}, -9, None),
        (ended(137, "OOMKilled"), {}, -9, "memory: limit 2048 MB"),
        (ended(137, "ContainerStatusUnknown", message="not found"), {}, -9, "lost: not found"),
        (ended(137), {"phase": "Failed", "reason": "NodeShutdown"}, -9, "lost: NodeShutdown"),
        (ended(143), {"metadata": {"deletionTimestamp": "now"}}, -15, "lost: somebody deleted its pod"),
        (ended(1), {"metadata": {"deletionTimestamp": "now"}}, 1, None),
        (
            ended(137),
            {"phase": "Failed", "reason": "Evicted", "message": 'Usage of EmptyDir volume "x" exceeds the limit'},
            -9,
            'disk: Usage of EmptyDir volume "x" exceeds the limit',
        ),
    ],
)
def test_how_an_agent_ended(agent, status, code, cause):
    exit = look(pod(agent=agent, files=ended(0), **status), Limits()).exit
    assert (exit.code, exit.cause and str(exit.cause)) == (code, cause)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"agent": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}, "image: i: no"),
        ({"out": {"waiting": {"reason": "ErrImageNeverPull"}}}, "image: i: ErrImageNeverPull"),
        ({"agent": {"waiting": {"reason": "CreateContainerError", "message": "x"}}}, "launch: CreateContainerError: x"),
        ({"files": ended(1, message="tar")}, "launch: files-in ended with code 1: Error: tar"),
        ({"out": ended(137, "OOMKilled")}, "lost: files-out ended with code 137: OOMKilled"),
        ({"phase": "Failed", "reason": "Evicted", "message": "node was low on memory"}, "lost: Evicted: node was low"),
        ({"phase": "Failed", "reason": "NodeLost"}, "lost: NodeLost"),
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "m"}, "backend: its node does not take it: OutOfcpu: m"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "lost: it lasted longer than the deadline of its pod"),
        ({"phase": "Unknown"}, "lost: its node does not report any more"),
        ({"metadata": {"deletionTimestamp": "now"}}, "lost: somebody deleted its pod"),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]},
            "lost: its pod has to go: DeletionByTaintManager",
        ),
    ],
)
def test_why_a_pod_is_given_up(given, cause):
    with pytest.raises(BackendError) as lost:
        look(pod(**given), Limits())
    assert str(lost.value.cause).startswith(cause)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"agent": {"waiting": {"reason": "InvalidImageName", "message": "bad name"}}}, "agent.image: bad name"),
        (
            {"agent": {"waiting": {"reason": "RunContainerError", "message": "executable file not found in $PATH"}}},
            "executable file not found",
        ),
        ({"agent": ended(128, "StartError", message="exec format error")}, "exec format error"),
    ],
)
def test_what_only_the_recipe_can_mend(given, said):
    with pytest.raises(RecipeError, match=said):
        look(pod(**given), Limits())


async def test_a_command_that_ends_with_the_container_that_it_filled_has_done_its_work(monkeypatch):
    """Though the watch is late to tell."""

    async def killed(*_):
        raise begin.execs.ExecError("exit code 137: ")

    monkeypatch.setattr(begin.execs, "fill", killed)
    attempt = Attempt("x", Limits())
    attempt.update(pod(files={"running": {}}))
    asyncio.get_running_loop().call_later(1.5, attempt.update, pod(files=ended(0)))
    await begin.fill(None, attempt, None, 0)
    assert attempt.is_past("filled")


# logs

LOG = b"2026-01-01T00:00:00.000000001Z one\n2026-01-01T00:00:00.000000002Z two two\n2026-01-01T00:00:00.000000003Z \n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_times_are_taken_off_the_lines_of_a_log_in_whatever_pieces_they_come(size):
    stamped = Stamped()
    assert b"".join(stamped.take(LOG[at : at + size]) for at in range(0, len(LOG), size)) == b"one\ntwo two\n\n"


@pytest.mark.parametrize("cut", range(len(LOG)))
def test_a_log_that_broke_off_anywhere_goes_on_where_it_was(cut):
    stamped = Stamped()
    first = stamped.take(LOG[:cut])
    since = stamped.last
    stamped.read_anew()
    lines = [line for line in LOG.splitlines(keepends=True) if line[:30].decode() >= since]
    assert first + stamped.take(b"".join(lines)) == b"one\ntwo two\n\n"


def test_a_line_without_a_time_is_kept():
    assert Stamped().take(b"x" * 100 + b"\n") == b"x" * 100 + b"\n"


# what an agent left


def taken(folder, most_bytes=1 << 20, most_files=1000):
    done = subprocess.run(
        ["sh", "-c", TAKE, "sh", str(most_bytes), str(most_files), folder], capture_output=True, check=True
    )
    too_much, special = map(int, done.stderr.split(b"left ")[1].split())
    return done.stdout, too_much, special


def test_what_an_agent_left_is_packed_as_far_as_it_is_harmless(tmp_path):
    work = tmp_path / "pod" / "work"
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "er" / "answer").write_text("42")
    (work / "run.sh").write_text("x")
    (work / "run.sh").chmod(0o755)
    (work / "link").symlink_to("deep/er/answer")
    (work / "out").symlink_to("/etc/passwd")
    (work / "twice").hardlink_to(work / "run.sh")
    (work / "shut").write_text("x")
    (work / "shut").chmod(0)
    (work / "two\nlines").write_text("x")
    (work / "back\\nslash").write_text("x")
    with (work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    subprocess.run(["mkfifo", work / "pipe"], check=True)
    archive, too_much, special = taken(tmp_path / "pod")
    assert too_much == 1, "the sparse file"
    assert special >= 3, "the pipe, and two names that no list can hold"
    unpacked = tmp_path / "copy"
    assert unpack(io.BytesIO(archive), unpacked, most_bytes=1 << 20, most_files=1000) == (1, 0), (
        "the link that leads out"
    )
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}
    assert found == {"deep", "deep/er", "deep/er/answer", "run.sh", "link", "twice", "shut"}
    assert (unpacked / "twice").read_text() == "x" and (unpacked / "run.sh").stat().st_mode & 0o100


def test_no_more_is_packed_than_was_asked_for(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    for n in range(10):
        (work / f"{n}").write_bytes(bytes(1000))
    archive, *left = taken(tmp_path, most_bytes=3500)
    assert left == [7, 0] and len([member for member in names(archive) if member != "."]) == 3
    archive, *left = taken(tmp_path, most_files=4)
    assert left == [6, 0] and len([member for member in names(archive) if member != "."]) == 4
    deep = work
    for _ in range(70):
        deep = deep / "d"
        deep.mkdir()
    assert taken(tmp_path)[1:] == (1, 0)


def test_a_working_directory_that_was_replaced_is_not_followed(tmp_path):
    (tmp_path / "work").symlink_to("/etc")
    assert taken(tmp_path) == (b"", 0, 1)


def names(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_a_further_name_of_a_file_cannot_lead_out(tmp_path):
    data = io.BytesIO()
    (tmp_path / "secret").write_text("x")
    with tarfile.open(fileobj=data, mode="w") as tar:
        for target in ("../secret", "/etc/passwd", "missing"):
            member = tarfile.TarInfo(f"to-{target.replace('/', '-')}")
            member.type, member.linkname = tarfile.LNKTYPE, target
            tar.addfile(member)
    data.seek(0)
    assert unpack(data, tmp_path / "copy", most_bytes=1000, most_files=10) == (0, 3)
    assert list((tmp_path / "copy").iterdir()) == []


def test_a_client_that_is_not_installed_is_named(tmp_path, monkeypatch):
    from aglite.rollouts.backends.kube.api import Api

    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    for name in ("kubernetes.aio", "kubernetes.aio.client", "kubernetes.aio.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecipeError, match="client is not installed") as refused:
        asyncio.run(Api.connect(recipe(tmp_path).agent.kubernetes))
    assert refused.value.mend == "pip install 'aglite[kubernetes]'"
