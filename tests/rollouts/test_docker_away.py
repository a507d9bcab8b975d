"""A Docker Engine that dies under a run and comes back: an engine of the test's own, so that nobody else's is hurt."""

import asyncio
import os
import shutil
import signal
import subprocess
import time

import pytest
from bench import Bench, is_running, until

from aglite.rollouts.backends.engine import connect

pytestmark = [pytest.mark.docker, pytest.mark.slow]


class PrivateEngine:
    """A dockerd with all its files in one folder, in a network of its own: with this machine's, `--bridge=none` would
    delete the bridge of the engine that is there."""

    def __init__(self, folder):
        self.folder = folder
        self.socket = f"unix://{folder}/docker.sock"
        self.process = None

    def start(self):
        folder = self.folder
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(
                        "unshare",
                        "--net",
                        "dockerd",
                        f"--host={self.socket}",
                        f"--data-root={folder}/data",
                        f"--exec-root={folder}/exec",
                    ),
                    *(f"--pidfile={folder}/pid", "--bridge=none", "--iptables=false", "--ip-forward=false"),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while self.ask("version").returncode:
            assert time.monotonic() < deadline and self.process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)

    def ask(self, *arguments):
        return subprocess.run(["docker", "--host", self.socket, *arguments], capture_output=True, text=True)

    def end(self, number):
        containerd = self.folder / "exec" / "containerd" / "containerd.pid"
        pid = int(containerd.read_text())
        self.process.send_signal(number)
        self.process.wait(120)
        deadline = time.monotonic() + 60
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # its number may be a zombie's for a while, which a new dockerd would take for a containerd
        containerd.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def engine(image, tmp_path_factory):
    if os.getuid() or not shutil.which("dockerd"):
        pytest.skip("only root can start an engine, and dockerd must be installed")
    made = PrivateEngine(tmp_path_factory.mktemp("engine"))
    made.start()
    try:
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
            load = ["docker", "--host", made.socket, "load", "--quiet"]
            subprocess.run(load, stdin=saved.stdout, stdout=subprocess.DEVNULL, check=True)
        yield made
    finally:
        if made.process.poll() is not None:
            made.start()  # it ends what runs in it
        for container in made.ask("ps", "--all", "--quiet").stdout.split():
            made.ask("rm", "--force", "--volumes", container)
        made.end(signal.SIGTERM)
        subprocess.run(["umount", "--quiet", made.folder / "data"])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_rollouts_survive_an_engine_that_ends_and_comes_back(tmp_path, engine, image, monkeypatch, how):
    monkeypatch.setenv("DOCKER_HOST", engine.socket)
    agent = """
        import os, time
        if os.environ["OPENAI_API_KEY"] == "first": time.sleep(600)
        open("answer", "w").write(os.environ["AGLITE_ROLLOUT_ID"])
    """
    grade = "def grade(t, r, workdir):\n    return float((workdir / 'answer').read_text() == r['id'])\n"
    async with Bench(tmp_path, agent, grade=grade, concurrency=3, attempts=6, image=image) as bench:
        bench.gateway.on_open = lambda session, number: number <= 3 and setattr(session, "token", "first")
        tasks = [await bench.submit() for _ in range(6)]
        await until(lambda: bench.launcher.counts()["running"] == 3)
        await asyncio.to_thread(engine.end, how)
        await asyncio.sleep(1)
        await asyncio.to_thread(engine.start)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 240)
        assert {(outcome.state, outcome.reward) for outcome in outcomes} == {("done", 1.0)}
        assert [outcome.attempt > 1 for outcome in outcomes[:3]] == [True] * 3
        causes = {
            row["cause"].partition(":")[0] for task in tasks for row in bench.store.rollout_states(task.rollout_id)
        }
        assert causes - {""} <= {"lost", "backend", "launch"}
    client = connect()
    assert client.containers(all=True) == []
    client.close()


async def test_without_an_engine_rollouts_end_in_errors_that_say_so(tmp_path, engine, image, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", engine.socket)
    async with Bench(tmp_path, "print('ran')", attempts=2, image=image) as bench:
        assert (await bench.run()).state == "done"
        engine.end(signal.SIGTERM)
        task = await bench.submit()
        await until(lambda: any("backend" in row["cause"] for row in bench.store.rollout_states(task.rollout_id)))
        bench.launcher.kill(task.rollout_id)
        assert (await task).state == "cancelled"
    engine.start()
    assert engine.ask("ps", "--all", "--quiet").stdout == ""
