"""Tests as graders where agents have containers: they run in a fresh one."""

import importlib.util
import io
import tarfile
from pathlib import Path

import pytest
from bench import Bench

pytestmark = pytest.mark.docker
NAME = "aglite-test/with-pytest"
TEST = """
import os, socket
from calc import add
def test_adds(): assert add(2, 3) == 5
def test_sealed():
    assert os.getuid() != 0 and not os.path.exists("/var/run/docker.sock")
    try: socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError: return
    raise AssertionError("there is a network")
def test_fresh(): assert not os.path.exists("/tmp/left") and os.readlink("link") == "calc.py"
"""
IDS = [f"tests/test_calc.py::{name}" for name in ("test_adds", "test_sealed", "test_fresh")]


@pytest.fixture(scope="module")
def with_pytest(docker_client, image):
    """The agents' image with this interpreter's pytest put in."""
    container = docker_client.create_container(image, command="true")["Id"]
    try:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for module in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
                folder = Path(importlib.util.find_spec(module).origin).parent
                tar.add(folder, module, filter=lambda member: None if "__pycache__" in member.name else member)
            tar.add(importlib.util.find_spec("py").origin, "py.py")
        docker_client.put_archive(container, "/usr/lib/python3/dist-packages", archive.getvalue())
        docker_client.commit(container, NAME)
    finally:
        docker_client.remove_container(container, force=True)
    yield NAME
    docker_client.remove_image(NAME, force=True)


def bench_for(tmp_path, agent, image, **reward):
    settings = {"tests": ["tests"], "fail_to_pass": IDS}
    bench = Bench(tmp_path, agent, reward={"grade": None, "pytest": settings, "timeout_s": 60, **reward}, image=image)
    (bench.recipe.folder / "tests").mkdir()
    (bench.recipe.folder / "tests" / "test_calc.py").write_text(TEST)
    return bench


@pytest.mark.parametrize(("sum", "reward", "share"), [("a + b", 1.0, 1.0), ("0", 0.0, 2 / 3)])
async def test_tests_run_in_a_fresh_container(tmp_path, with_pytest, containers, sum, reward, share):
    agent = f"""
        import os
        open("calc.py", "w").write("def add(a, b): return {sum}")
        os.symlink("calc.py", "link"); open("/tmp/left", "w").write("x")
        os.mkdir("tests"); open("tests/conftest.py", "w").write("import os; os._exit(0)")
        open("sitecustomize.py", "w").write("import os; os._exit(0)")
    """
    async with bench_for(tmp_path, agent, with_pytest) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", reward), (outcome, bench.log())
        assert outcome.breakdown == {"fail_to_pass": pytest.approx(share)}
        assert outcome.flags == ["touched_tests"] and "passed" in bench.log()


async def test_an_image_without_pytest_is_said(tmp_path, image, containers):
    async with bench_for(tmp_path, "", image) as bench:
        outcome = await bench.run()
        assert outcome.state == "error" and "No module named 'pytest'" in outcome.cause


async def test_tests_that_do_not_end(tmp_path, with_pytest, containers, monkeypatch):
    monkeypatch.setattr("aglite.rollouts.sandboxed_tests.BEGUN_S", 3.0)
    agent = "open('calc.py', 'w').write('import time; time.sleep(600)')"
    async with bench_for(tmp_path, agent, with_pytest, timeout_s=1) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 0.0, ["grader_timeout"])
