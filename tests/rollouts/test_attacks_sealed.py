"""Attempts to get out of a sealed container: all in one rollout, with the real launcher, gateway and grading.

The attempts are in tests/helpers/attempts_*.py; here are their targets, which the test makes, and how each has to end.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

import attempts_gateway
import attempts_machine
import attempts_network
import psutil
import pytest
from attempts import MARK
from bench import Bench, until
from staging import running
from tiny import tiny_model

from aglite.gateway.app import create_model_app
from aglite.gateway.renderers import load_renderer
from aglite.net import Listener, bind

pytestmark = pytest.mark.docker

HELPERS = Path(attempts_network.__file__).parent
FILES = ("attempts.py", "attempts_network.py", "attempts_gateway.py", "attempts_machine.py")
SECRET = "the hidden answer is 42"

AGENT = """
    import json, os, sys, time, urllib.request
    task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
    if task["role"] == "attacker":
        import attempts, attempts_gateway, attempts_machine, attempts_network
        attempts.make([attempts_network, attempts_gateway, attempts_machine])
    elif task["role"] == "victim":
        while not os.path.exists("/tmp/never"):
            time.sleep(0.2)
    else:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
        open("answer", "w").write("42")
"""

GRADE = """
    def grade(task, rollout, workdir):
        answer = workdir / "answer"
        assert task["hidden"]["text"] == "the hidden answer is 42"
        return float(answer.is_file() and answer.read_text() == "42")
"""

REFUSED = {"ENETUNREACH", "ECONNREFUSED", "EADDRNOTAVAIL", "EHOSTUNREACH"}
NOT_ALLOWED = {"EPERM", "EACCES"}
NOT_THERE = {"ENOENT", "ENXIO", "ENODEV"}
READ_ONLY = {"EROFS", "EACCES", "EPERM"}
"""An ordinary user is refused before it is found out that nothing can be written anyway."""

ENDINGS = {
    "tcp_to_the_host": REFUSED,
    "udp_to_the_host": {"ENETUNREACH"},
    "ipv6_to_the_host": REFUSED | {"EAFNOSUPPORT"},
    "dns": {"ENETUNREACH", "gaierror", "ECONNREFUSED"},
    "raw_sockets": {"EPERM"},
    "ping": {"ENETUNREACH", "EACCES"},
    "listeners_on_the_hosts_loopback": {"ECONNREFUSED", "ENOENT", "EACCES"},
    "sockets_to_the_hypervisor": {"EPERM", "EAFNOSUPPORT"},
    "a_way_out_of_its_own": {"EPERM", "ENOENT"},
    "the_gateway_as_a_proxy": {"400", "404", "405"},
    "the_control_api": {"404", "405", *REFUSED},
    "a_reward_of_its_own_making": {"404", "405"},
    "tokens_of_others": {"401", "403", "404"},
    "the_docker_engine": NOT_THERE,
    "files_of_the_host": NOT_THERE | {"EACCES"},
    "mounts": {"EPERM"},
    "namespaces": {"EPERM", "EINVAL"},
    "devices": NOT_ALLOWED | NOT_THERE,
    "doors_of_the_kernel": {"EPERM", "ENOSYS"},
    "switches_in_proc": READ_ONLY | NOT_THERE,
    "secrets_in_proc": {"empty", "EACCES", "EPERM", "ENOENT"},
    "its_own_limits": READ_ONLY | {"ValueError"},
    "the_clock": {"EPERM", "none"},
    "becoming_root": {"EPERM", "no"},
    "other_processes": {"own", "ESRCH", "ENOENT", "EPERM"},
    "programs_and_libraries": READ_ONLY | {"ENOENT"},
    "the_hidden_part": {"not there"},
    "open_descriptors": {"none"},
    "the_operators_terminal": {"ENOTTY", "ENXIO", "EINVAL", "ENOENT", "EPERM"},
    "the_init_process": {"yes"},
}


@dataclass
class Targets:
    """Listeners, a file and a process of the test's own, all outside of any container."""

    folder: Path
    arrived: list = field(default_factory=list)
    task: dict = field(default_factory=dict)

    @contextlib.contextmanager
    def standing(self):
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            tcp = enter(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
            udp = enter(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            udp.bind(("::", 0))
            abstract, path = enter(socket.socket(socket.AF_UNIX)), enter(socket.socket(socket.AF_UNIX))
            self.task = {
                "hosts": [*_addresses(socket.AF_INET), "198.51.100.1"],
                "hosts6": [a for a in _addresses(socket.AF_INET6) if "%" not in a],
                "tcp": tcp.getsockname()[1],
                "udp": udp.getsockname()[1],
                "abstract": f"aglite-test-{os.getpid()}",
                "path": str(self.folder / "socket"),
                "secret_file": str(self.folder / "secret"),
            }
            abstract.bind(f"\0{self.task['abstract']}")
            path.bind(self.task["path"])
            os.chmod(self.task["path"], 0o777)
            (self.folder / "secret").write_text(SECRET)
            sleeper = subprocess.Popen(["sleep", "1000"])
            stack.callback(sleeper.wait)
            stack.callback(sleeper.kill)
            self.task["pid"] = sleeper.pid
            for sock in (tcp, abstract, path):
                sock.listen()
                threading.Thread(target=self._accept, args=(sock,), daemon=True).start()
                stack.callback(sock.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=self._receive, args=(udp,), daemon=True).start()
            stack.callback(udp.close)
            yield
            assert sleeper.poll() is None

    def _accept(self, sock):
        while True:
            try:
                connection, address = sock.accept()
            except OSError:
                return
            self.arrived.append(address)
            connection.close()

    def _receive(self, sock):
        while True:
            try:
                self.arrived.append(sock.recvfrom(512)[1])
            except OSError:
                return

    def knock(self):
        """What the agents will try, from here, where it works; how often it arrived."""
        own = {**self.task, "hosts": _addresses(socket.AF_INET)}
        tries = attempts_network.tcp_to_the_host(own) + attempts_network.udp_to_the_host(own)
        tries += attempts_network.listeners_on_the_hosts_loopback(self.task)[:3]
        return sum(outcome.startswith("done") for _, outcome in tries)


def _addresses(family):
    return [a.address for all in psutil.net_if_addrs().values() for a in all if a.family == family]


@dataclass
class Evidence:
    results: dict
    attacker: object
    other: object
    arrived: list
    dead: object
    calls: dict
    leftovers: list
    hosts: int


@pytest.fixture(scope="module")
def evidence(tmp_path_factory, image, docker_client):
    """One run in which one agent makes all the attempts while another one does nothing beside it."""
    folder = tmp_path_factory.mktemp("attacks")
    targets = Targets(folder)
    with targets.standing():
        return asyncio.run(_attacked(folder, targets, image, docker_client))


async def _attacked(folder, targets, image, docker_client):
    renderer = load_renderer(tiny_model(folder / "tiny"))
    knocked = targets.knock()
    await until(lambda: len(targets.arrived) >= knocked)
    async with running(folder, renderer) as stage:
        door = Listener(create_model_app(stage.gateway), bind("127.0.0.1", 0, "the gateway", "gateway.port"))
        await door.start()
        control = socket.create_server(("127.0.0.1", 0))
        bench = Bench(
            folder,
            AGENT,
            grade=GRADE,
            gateway=stage.gateway,
            store=stage.store,
            serve=door.also,
            image=image,
            files=list(FILES),
            concurrency=4,
            limits={"wall_s": 200},
        )
        for name in FILES:
            shutil.copy(HELPERS / name, bench.recipe.folder / name)
        (bench.recipe.folder / ".git").mkdir()
        (bench.recipe.folder / ".git" / "packed-refs").write_text(SECRET)
        hidden = {"text": SECRET}
        async with bench:
            dead_token = {}
            opened = stage.gateway.open_session

            def open_session(rollout_id, *arguments, **options):
                session = opened(rollout_id, *arguments, **options)
                dead_token[rollout_id] = session.token
                return session

            stage.gateway.open_session = open_session
            dead = await bench.run({"role": "good"}, hidden=hidden)
            dead_id = bench.last
            other = await bench.submit({"role": "victim"}, hidden=hidden)
            await until(lambda: bench.launcher.counts()["running"] == 1)
            task = {
                **targets.task,
                "role": "attacker",
                "control": control.getsockname()[1],
                "dead": dead_id,
                "dead_token": dead_token[dead_id],
                "other": other.rollout_id,
                "other_token": dead_token[other.rollout_id],
            }
            attacker = await bench.run(task, hidden=hidden)
            log = bench.log()
            attacker_id = bench.last
            line = next((line for line in log.splitlines() if line.startswith(MARK)), None)
            assert line, log
            assert not other.done()
            knocked += targets.knock()  # behind whatever the attacker sent
            await until(lambda: len(targets.arrived) >= knocked)
            arrived = list(targets.arrived)
            bench.launcher.kill(other.rollout_id)
            other = await other
            calls = {row["id"]: row["calls"] for row in stage.store.rollouts(limit=10)}
            calls = {"attacker": calls[attacker_id], "dead": calls[dead_id]}
        await door.stop()
        control.close()
        found = docker_client.containers(all=True, filters={"label": f"aglite.run={(folder / 'run').resolve()}"})
        return Evidence(json.loads(line.removeprefix(MARK)), attacker, other, arrived, dead, calls, found, knocked)


ALL = [f.__name__ for module in (attempts_network, attempts_gateway, attempts_machine) for f in module.ATTEMPTS]


@pytest.mark.parametrize("name", ALL)
def test_an_attempt_comes_to_nothing(evidence, name):
    endings = evidence.results[name]
    assert endings, "it ended without a word"
    assert {ending for _, ending in endings} <= ENDINGS[name], endings


def test_there_is_an_ending_for_every_attempt():
    assert set(ALL) == set(ENDINGS) and len(ALL) >= 30


def test_nothing_arrived_from_inside(evidence):
    assert evidence.hosts >= 5 and len(evidence.arrived) == evidence.hosts, "only what the test sent itself"


def test_the_attacker_got_the_reward_of_its_work_and_is_flagged(evidence):
    assert (evidence.attacker.state, evidence.attacker.reward, evidence.attacker.attempt) == ("done", 0.0, 1)
    assert evidence.attacker.flags == ["no_calls", "network"]


def test_the_others_are_as_they_would_have_been(evidence):
    assert (evidence.dead.state, evidence.dead.reward, evidence.dead.flags) == ("done", 1.0, [])
    assert (evidence.other.state, evidence.other.cause) == ("cancelled", "killed"), "by the test, not by the attacker"
    assert evidence.calls == {"attacker": 0, "dead": 1}
    assert evidence.leftovers == []
