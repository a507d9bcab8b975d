"""What only a container can promise: sealed, limited, without privileges, and gone afterwards."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from bench import Bench, until
from seen import what_is_seen

from aglite.errors import RecipeError
from aglite.rollouts.backends.engine import Engine

pytestmark = pytest.mark.docker
STAND_IN = Path(__file__).parents[1] / "helpers" / "supervisor_stand_in.py"


@pytest.fixture
def listener():
    """A listening port of the test's own, on all of this machine's addresses; counts who connects."""
    arrived = []
    with socket.create_server(("0.0.0.0", 0)) as server:

        def accept():
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                arrived.append(address)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], arrived
        server.shutdown(socket.SHUT_RDWR)


def host_addresses():
    """Addresses of this machine, Docker's bridge among them."""
    return [a.address for all in psutil.net_if_addrs().values() for a in all if a.family == socket.AF_INET]


async def test_sealed_means_that_nothing_but_the_gateway_can_be_reached(tmp_path, image, containers, listener):
    port, arrived = listener
    agent = """
    task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
    gateway = socket.create_connection(("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])))
    gateway.sendall(b"GET / HTTP/1.0\\n")
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        udp.sendto(b"x", (task["hosts"][-1], 53))
        sent = "sent"
    except OSError as error:
        sent = error.strerror
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
        raw = "opened"
    except OSError as error:
        raw = error.strerror
    try:
        name = socket.gethostbyname("deb.debian.org")
    except OSError:
        name = None
    json.dump({
        "gateway": gateway.recv(15).decode(),
        "hosts": [connects(host, task["port"]) for host in task["hosts"]],
        "udp": sent, "raw": raw, "name": name,
        "devices": sorted(os.listdir("/sys/class/net")),
    }, open("seen.json", "w"))
    """
    hosts = [*host_addresses(), "192.0.2.1"]
    for host in hosts[:-1]:
        socket.create_connection((host, port), timeout=2).close()
    await until(lambda: len(arrived) == len(hosts) - 1)
    seen = await what_is_seen(tmp_path, agent, {"port": port, "hosts": hosts}, image=image)
    assert seen["gateway"].startswith("HTTP/1.0 200")
    assert "connected" not in seen["hosts"]
    assert len(arrived) == len(hosts) - 1, "nothing arrived from inside"
    assert (seen["udp"], seen["raw"], seen["name"]) == ("Network is unreachable", "Operation not permitted", None)
    assert seen["devices"] == ["lo"]


async def test_open_is_a_choice(tmp_path, image, containers, listener, docker_client):
    port, arrived = listener
    (bridge,) = [a.address for a in psutil.net_if_addrs()["docker0"] if a.family == socket.AF_INET]
    agent = """
    task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
    gateway = connects("127.0.0.1", 8000)
    json.dump([gateway, connects(task["host"], task["port"])], open("seen.json", "w"))
    """
    seen = await what_is_seen(tmp_path, agent, {"port": port, "host": bridge}, image=image, network="open")
    assert seen == ["connected", "connected"]
    await until(lambda: arrived)
    assert len(arrived) == 1


async def test_an_agent_has_no_privilege_and_sees_nothing_of_the_host(tmp_path, image, containers, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_SUPERVISOR", "x")
    agent = """
    processes = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
    json.dump({
        "uid": [os.getuid(), os.getgid(), os.getgroups()],
        "caps": [line(f"Cap{kind}") for kind in ("Eff", "Prm", "Bnd", "Inh", "Amb")],
        "no_new_privs": line("NoNewPrivs"), "seccomp": line("Seccomp"),
        "writes": [writes(p) for p in ("/x", "/etc/passwd", "/usr/bin/x", "/sys/x", "/proc/sysrq-trigger")],
        "scratch": [writes(p) for p in ("/tmp/x", "/rollout/home/x", "x")],
        "sockets": [p for p in ("/var/run/docker.sock", "/run/docker.sock", "/door") if os.path.exists(p)],
        "rollout": sorted(os.listdir("/rollout")),
        "processes": len(processes),
        "env": dict(os.environ),
    }, open("seen.json", "w"))
    """
    seen = await what_is_seen(tmp_path, agent, image=image)
    assert seen["uid"] == [1000, 1000, [1000]] or seen["uid"] == [1000, 1000, []]
    assert set(seen["caps"]) == {"0000000000000000"}
    assert (seen["no_new_privs"], seen["seccomp"]) == ("1", "2")
    assert "written" not in seen["writes"]
    assert set(seen["scratch"]) == {"written"}
    assert seen["sockets"] == []
    assert seen["rollout"] == ["home", "task.json", "work"]
    assert seen["processes"] == 2, "the agent and the init process above it"
    assert "SECRET_OF_THE_SUPERVISOR" not in seen["env"]
    assert "AGLITE_SUPERVISOR" not in seen["env"]


async def test_root_in_the_container_has_no_capability_either(tmp_path, image, containers):
    agent = """
    json.dump([os.getuid(), line("CapEff"), writes("/etc/x"), writes("/rollout/work/x")], open("seen.json", "w"))
    """
    seen = await what_is_seen(tmp_path, agent, image=image, user="0:0")
    assert seen == [0, "0000000000000000", "Read-only file system", "written"]


async def test_the_first_agent_leaves_nothing_for_the_next(tmp_path, image, containers):
    agent = """
        import os
        home = os.environ["HOME"]
        print(sorted(os.listdir(".")), os.listdir(home), os.listdir("/tmp"), sorted(os.listdir("/rollout")))
        for folder in (".", home, "/tmp", "/rollout", "/dev/shm"):
            try:
                os.makedirs(folder + "/a/b"); open(folder + "/a/b/c", "w").write("x")
                os.chmod(folder + "/a/b", 0)
            except OSError as error:
                print(folder, error)
        os.chmod("/rollout", 0)
    """
    async with Bench(tmp_path, agent, concurrency=1, image=image) as bench:
        logs = []
        for _ in range(2):
            await bench.run()
            logs.append(bench.log())
        assert logs[0] == logs[1] == "['agent.py'] [] [] ['home', 'task.json', 'work']\n"
        assert len(containers("sidecar")) == 1, "the second rollout had the same sidecar"


HOSTILE = """
    import os
    os.symlink("/etc/shadow", "absolute"); os.symlink("../../../../etc/shadow", "relative")
    os.mkfifo("pipe")
    with open("sparse", "wb") as file: file.truncate(1 << 40)
    open("twice", "w").write("x" * 1000)
    for i in range(50): os.link("twice", f"link{i}")
    os.makedirs("shut"); open("shut/in", "w").write("x"); os.chmod("shut/in", 0); os.chmod("shut", 0)
    open(b"\\xff\\xfe name", "w").write("x")
    os.mkdir("many")
    for i in range(25000): open(f"many/{i}", "w").close()
    top = os.getcwd()
    for i in range(3000):
        os.mkdir("d"); os.chdir("d")
    os.chdir(top)
    open("answer", "w").write("42")
"""


async def test_what_a_hostile_agent_leaves_is_copied_as_far_as_it_is_harmless(tmp_path, image, containers):
    grade = """
        import json, os
        def grade(task, rollout, workdir):
            found = {}
            for folder, folders, files in os.walk(workdir):
                for name in files:
                    path = os.path.join(folder, name)
                    assert os.path.isfile(path) and not os.path.islink(path), path
                    found[os.path.relpath(path, workdir)] = os.path.getsize(path)
            assert (workdir / "shut" / "in").read_text() == "x"
            assert len([name for name in found if name.startswith("link")]) == 50
            assert "sparse" not in found and not any(name.startswith("many/") for name in found)
            assert b"\\xff\\xfe name" in map(os.fsencode, found)
            return float((workdir / "answer").read_text() == "42")
    """
    async with Bench(tmp_path, HOSTILE, grade=grade, concurrency=1, image=image) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == (
            "done",
            1.0,
            ["symlinks", "special_files", "oversize"],
        ), bench.log()
        # 3,000 folders deep cannot be wiped: its sidecar goes, and the next rollout has a clean one
        assert (await bench.run()).reward == 1.0


async def test_a_fork_bomb_is_bounded_and_gone(tmp_path, image, containers):
    agent = """
        import os, time
        count = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(100)
                    os._exit(0)
                count += 1
        except OSError as error:
            print(count, error.strerror, flush=True)
        os._exit(0)
    """
    async with Bench(tmp_path, agent, limits={"pids": 50}, image=image) as bench:
        assert (await bench.run()).state == "done"
        count, text = bench.log().split(" ", 1)
        assert 40 < int(count) < 50 and text == "Resource temporarily unavailable\n"


async def test_the_disk_is_bounded(tmp_path, image, containers):
    agent = """
        import os
        for folder in (".", "/tmp"):
            try:
                with open(folder + "/big", "wb") as file:
                    for _ in range(100): file.write(bytes(1 << 20)); file.flush()
            except OSError as error:
                print(folder, os.path.getsize(folder + "/big") >> 20, error.strerror)
            os.unlink(folder + "/big")
        open("after", "w").write("x")
    """
    async with Bench(tmp_path, agent, limits={"disk_mb": 20}, image=image) as bench:
        assert (await bench.run()).state == "done"
        assert bench.log() == ". 19 No space left on device\n/tmp 20 No space left on device\n"


async def test_a_container_that_somebody_removes_is_lost_and_tried_again(tmp_path, image, containers, docker_client):
    agent = "import os, time; time.sleep(100 if os.environ['OPENAI_API_KEY'] == 'first' else 0)"
    async with Bench(tmp_path, agent, image=image) as bench:
        bench.gateway.on_open = lambda session, number: number == 1 and setattr(session, "token", "first")
        task = await bench.submit()
        await until(lambda: bench.launcher.counts()["running"])
        docker_client.remove_container(containers("agent")[0]["Id"], force=True)
        outcome = await task
        assert (outcome.state, outcome.attempt) == ("done", 2)
        causes = [row["cause"] for row in bench.store.rollout_states(task.rollout_id) if row["state"] == "queued"]
        assert causes[1].startswith("lost: ")


async def test_what_is_made_for_somebody_who_was_cancelled_does_not_stay(tmp_path, image, containers):
    engine = Engine(str((tmp_path / "run").resolve()), "nobody")
    await engine.open()
    made = []
    call = engine.call

    async def slow(method, *args, **kwargs):
        answer = await call(method, *args, **kwargs)
        if method == "create_container_from_config":
            made.append(answer["Id"])
            making.cancel()
            await asyncio.sleep(0)
        return answer

    engine.call = slow
    making = asyncio.create_task(engine.create({"Image": image, "Cmd": ["true"]}, {}))
    with pytest.raises(asyncio.CancelledError):
        await making
    await engine.close()
    assert len(made) == 1 and containers() == []


async def test_a_sidecar_that_died_is_replaced(tmp_path, image, containers, docker_client):
    async with Bench(tmp_path, "print('ran')", concurrency=1, image=image) as bench:
        assert (await bench.run()).state == "done"
        (sidecar,) = containers("sidecar")
        docker_client.kill(sidecar["Id"])
        await until(lambda: not containers("sidecar"))
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("done", 1)


async def test_nothing_is_left_but_images(tmp_path, image, containers):
    async with Bench(tmp_path, "print('ran')", image=image, concurrency=1) as bench:
        await bench.run()
        (sidecar,) = containers()
        assert sidecar["Labels"]["aglite.role"] == "sidecar"
    assert containers() == []
    assert not (tmp_path / "run" / "door.sock").exists()


async def test_the_image_is_pinned_when_the_run_starts(tmp_path, image, containers, docker_client):
    async with Bench(tmp_path, image=image) as bench:
        kept = bench.store.meta("sandbox")
        assert kept["image"] == image
        assert kept["image_id"] == docker_client.inspect_image(image)["Id"]


@pytest.mark.parametrize(
    ("section", "text", "mend"),
    [
        (
            {"image": "aglite/no-such-image"},
            "agent.image: this engine has no image 'aglite/no-such-image'",
            "docker pull",
        ),
        ({"image": "Not A Name"}, "agent.image: ", "correct the name"),
        ({"command": ["no-such"]}, "has no program 'no-such'", "/usr/bin"),
        ({"command": ["/opt/no-such"]}, "has no program '/opt/no-such'", "correct its path"),
    ],
)
async def test_what_the_engine_does_not_have_is_refused_at_the_start(tmp_path, image, containers, section, text, mend):
    bench = Bench(tmp_path, **{"image": image, **section})
    with pytest.raises(RecipeError, match=text) as refused:
        await bench.launcher.start()
    assert mend in refused.value.mend
    await bench.launcher.stop()
    bench.store.close()


@pytest.fixture
def killed(tmp_path, image, containers):
    """Ends a supervisor by SIGKILL in the middle of its rollouts, and its reaper too if that is asked for."""

    async def kill(reaper_too):
        process = subprocess.Popen([sys.executable, STAND_IN, tmp_path, image])  # noqa: ASYNC220
        try:
            await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), 150)
            if reaper_too:
                os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)
        finally:
            process.kill()
            process.wait()

    return kill


@pytest.fixture
def volumes(docker_client, tmp_path):
    """The volumes there are of the run: a function."""
    filters = {"label": [f"aglite.run={(tmp_path / 'run').resolve()}"]}
    return lambda: docker_client.volumes(filters=filters)["Volumes"] or []


async def test_sigkill_of_the_supervisor_ends_its_containers(tmp_path, image, containers, volumes, killed):
    await killed(reaper_too=False)
    await until(lambda: not containers() and not volumes())
    report = tmp_path / "run" / "logs" / "reaper.log"
    assert "containers: deleted" in await until(lambda: report.exists() and report.read_text())
    async with Bench(tmp_path, "print('again')", image=image) as bench:
        assert (await bench.run()).state == "done"


async def test_what_a_killed_reaper_missed_is_swept_at_the_next_start(tmp_path, image, containers, volumes, killed):
    await killed(reaper_too=True)
    await until(lambda: not containers("sidecar"))  # these end by themselves
    assert len(containers("agent")) >= 3
    async with Bench(tmp_path, "print('again')", image=image) as bench:
        assert containers("agent") == []
        assert len(volumes()) <= 2, "those of its own sidecars"
        assert (await bench.run()).state == "done"


async def test_another_run_on_the_same_engine_is_left_alone(tmp_path, image, docker_client, containers):
    (tmp_path / "other").mkdir()
    async with Bench(tmp_path, "import time; time.sleep(100)", image=image) as bench:
        task = await bench.submit()
        await until(lambda: bench.launcher.counts()["running"])
        async with Bench(tmp_path / "other", "print('x')", image=image) as other:
            assert (await other.run()).state == "done"
        assert not task.done() and len(containers("agent")) == 1
        bench.launcher.kill(task.rollout_id)
        await task


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_200_containers_16_at_once_leave_nothing(tmp_path, image, containers, docker_client):
    agent = "import os; open('answer', 'w').write(os.environ['AGLITE_ROLLOUT_ID'])"
    grade = "def grade(t, r, workdir):\n    return float((workdir / 'answer').read_text() == r['id'])\n"
    async with Bench(tmp_path, agent, grade=grade, concurrency=16, image=image) as bench:
        tasks = [await bench.submit() for _ in range(200)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(await asyncio.to_thread(containers, "agent")))
            await asyncio.sleep(1)
        outcomes = [task.result() for task in tasks]
        assert {(outcome.state, outcome.reward) for outcome in outcomes} == {("done", 1.0)}
        assert 2 <= most <= 16
        assert len(containers("agent")) == 0 and len(containers("sidecar")) <= 16
    assert containers() == []
    assert os.listdir(tmp_path / "run" / "scratch") == []
