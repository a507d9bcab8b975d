"""Control groups of local agents: real ones where this machine lets us make any, and how a place for them is found."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench import Bench, is_running, until

from aglite.rollouts.backends import local
from aglite.rollouts.backends.cgroups import Cgroups, NoCgroups, Place, find_places

STAND_IN = Path(__file__).parents[1] / "helpers" / "supervisor_stand_in.py"
HIDDEN = ["env", "-i", "setsid", "sleep", "300"]
"""Neither in the agent's process group nor with its environment."""


@pytest.fixture(scope="module")
def places():
    """Where groups can be made here; skips where none can."""
    try:
        found = find_places()
        Cgroups(found, f"try@test-{os.getpid()}").try_out()
    except NoCgroups as error:
        pytest.skip(f"no control groups here: {error}")
    return found


@pytest.fixture
def limited(places):
    """Skips where a controller is missing: a function of its name."""

    def need(controller):
        if not any(controller in place.controllers for place in places):
            pytest.skip(f"no control group here has the controller {controller}")

    return need


@pytest.fixture
def groups(places, tmp_path):
    """The groups there are of the run in `tmp_path/run`: a function of the test's, and none at its end."""
    run = f"x@{(tmp_path / 'run').resolve()}"
    prefix = Path(Cgroups(places, run).folders[0]).name.removesuffix("x")

    def found():
        return [str(folder) for place in places for folder in place.folder.glob(f"{prefix}*")]

    yield found
    assert found() == []


async def test_memory_is_that_of_all_processes_together(tmp_path, groups, limited):
    limited("memory")
    agent = """
        import subprocess, sys
        hold = "x = bytearray(b'x') * (60 << 20); print('held', flush=True); print(input(), flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        children = [subprocess.Popen([sys.executable, "-c", hold], **pipes) for _ in range(4)]
        for child in children: child.stdout.readline()  # it holds its memory, or it is gone
        def answers(child):
            try:
                child.stdin.write(b"there\\n")
                child.stdin.flush()
            except BrokenPipeError:
                return False
            return child.stdout.readline() == b"there\\n"
        there = sum(map(answers, children))  # who was killed does not, but may take a moment to be gone
        print(there, flush=True)
        sys.exit(there < len(children))
    """
    async with Bench(tmp_path, agent, limits={"memory_mb": 150}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause) == ("failed", "memory: limit 150 MB"), bench.log()
        assert int(bench.log()) < 3
    async with Bench(tmp_path, agent, limits={"memory_mb": 400}) as bench:
        assert (await bench.run()).state == "done"


def test_all_agents_together_do_not_get_what_one_process_gets(places, groups, limited, tmp_path):
    limited("cpu")
    ours = Cgroups(places, f"x@{(tmp_path / 'run').resolve()}", 4)
    ours.open()
    weights = [
        int((Path(folder) / name).read_text()) / usual
        for folder in ours.folders
        for name, usual in (("cpu.weight", 100), ("cpu.shares", 1024))
        if (Path(folder) / name).exists()
    ]
    ours.sweep()
    assert weights == [4]


async def test_a_fork_bomb_is_bounded_and_gone(tmp_path, groups, limited):
    limited("pids")
    agent = """
        import os, time
        count = 0
        try:
            while True:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(100)
                    os._exit(0)
                count += 1
        except OSError as error:
            print(count, error.strerror, flush=True)
        os._exit(0)
    """
    async with Bench(tmp_path, agent, limits={"pids": 50}) as bench:
        assert (await bench.run()).state == "done"
        count, text = bench.log().split(" ", 1)
        assert 40 < int(count) < 50 and text == "Resource temporarily unavailable\n"


async def test_processor_time_is_limited(tmp_path, groups, limited):
    limited("cpu")
    agent = """
        import time
        until = time.monotonic() + 3
        while time.monotonic() < until: pass
        print(time.process_time())
    """
    async with Bench(tmp_path, agent, limits={"cpus": 0.2}) as bench:
        assert (await bench.run()).state == "done"
        assert float(bench.log()) < 1.5


async def test_a_process_that_hides_is_gone_before_grading(tmp_path, groups):
    agent = f"""
        import os, subprocess, time
        child = subprocess.Popen({HIDDEN})
        while os.getsid(child.pid) == os.getsid(0): time.sleep(0.01)  # it hides; until then it is the session's
        print(child.pid)
    """
    grade = """
        def grade(task, rollout, workdir):
            return 1.0
    """
    async with Bench(tmp_path, agent, grade=grade) as bench:
        outcome = await bench.run()
        assert not is_running(int(bench.log()))
        assert (outcome.state, outcome.flags) == ("done", ["stragglers"])
        assert len(groups()) > 0, "the run's own group stays until its end"


async def test_groups_that_an_agent_makes_are_ended_and_deleted_too(tmp_path, groups):
    """They are its user's to make; who goes into one is found all the same."""
    agent = """
        import os, subprocess, time
        mounts = [line.split() for line in open("/proc/self/mountinfo")]
        roots = {mount[4] for mount in mounts if "cgroup" in mount[mount.index("-") + 1]}
        inner = []
        for folder, _, _ in (walked for root in roots for walked in os.walk(root)):
            if os.path.basename(folder).startswith(os.environ["AGLITE_ROLLOUT_ID"]):
                inner.append(folder + "/inner/most")
                os.makedirs(inner[-1])
        join = "; ".join(f"echo 0 >{folder}/cgroup.procs" for folder in inner)
        child = subprocess.Popen(["env", "-i", "sh", "-c", join + "; exec setsid sleep 300"])
        print(len(inner), child.pid)
        while os.getsid(child.pid) == os.getsid(0): time.sleep(0.01)  # it is in there
    """
    async with Bench(tmp_path, agent) as bench:
        assert (await bench.run()).state == "done"
        number, pid = map(int, bench.log().split())
        assert number > 0 and not is_running(pid)


async def test_what_hides_dies_with_a_killed_supervisor(tmp_path, groups):
    process = subprocess.Popen([sys.executable, STAND_IN, tmp_path])  # noqa: ASYNC220
    try:
        await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), 120)
        hidden = [int(pid) for pid in (tmp_path / "hidden").read_text().split()]
        assert len(hidden) == 3 and all(map(is_running, hidden))
        assert groups()
    finally:
        process.kill()
        process.wait()
    await until(lambda: not any(map(is_running, hidden)) and not groups())


async def test_what_a_killed_reaper_missed_is_swept_at_the_next_start(tmp_path, groups):
    process = subprocess.Popen([sys.executable, STAND_IN, tmp_path])  # noqa: ASYNC220
    try:
        await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), 120)
        os.kill(int((tmp_path / "ready").read_text().split()[1]), 9)
    finally:
        process.kill()
        process.wait()
    hidden = [int(pid) for pid in (tmp_path / "hidden").read_text().split()]
    await asyncio.sleep(0.5)
    assert all(map(is_running, hidden)), "nobody was there to end them"
    async with Bench(tmp_path, "print('again')") as bench:
        assert not any(map(is_running, hidden))
        assert (await bench.run()).state == "done"


async def test_without_groups_the_run_says_what_it_does_not_protect_from(tmp_path, monkeypatch):
    def none():
        raise NoCgroups("/sys/fs/cgroup: not writable")

    monkeypatch.setattr(local, "find_places", none)
    async with Bench(tmp_path) as bench:
        assert (await bench.run()).state == "done"
        exposed = bench.store.meta("sandbox")["exposed"]
    assert "(/sys/fs/cgroup: not writable)" in exposed and "limits.pids" in exposed and "may outlive" in exposed


# where groups can be made

V2 = "41 23 0:38 / {top} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(top, **groups):
    """A likeness of a version 2 tree: groups by path, as `controllers passed on to it/passed on by it`."""
    for path, (has, passes) in groups.items():
        folder = top / path.replace("root", "").replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(has)
        (folder / "cgroup.subtree_control").write_text(passes)
        (folder / "cgroup.procs").write_text("")
        if path != "root":
            (folder / "cgroup.type").write_text("domain\n")


@pytest.fixture
def not_ours(monkeypatch):
    """Folders (and what is in them) that may not be written to."""
    folders = []
    monkeypatch.setattr(
        os, "access", lambda path, mode: not any(Path(path) in (f, f / "cgroup.procs") for f in folders)
    )
    return folders


def test_a_users_programs_on_a_desktop_have_a_slice_that_passes_controllers_on(tmp_path, not_ours):
    tree(tmp_path, root=("cpu memory pids", "cpu memory pids"), user=("cpu memory pids", "memory pids"))
    tree(tmp_path, user__app=("memory pids", "memory pids"), user__app__terminal=("memory pids", ""))
    not_ours += [tmp_path]
    found = find_places(V2.format(top=tmp_path), "0::/user/app/terminal\n")
    assert found == [Place(tmp_path / "user" / "app", 2, frozenset({"memory", "pids"}))]


def test_a_delegated_group_makes_room(tmp_path, not_ours):
    tree(tmp_path, root=("cpu memory pids", "cpu memory pids"), scope=("cpu memory pids", ""))
    not_ours += [tmp_path]
    found = find_places(V2.format(top=tmp_path), "0::/scope\n")
    assert found == [Place(tmp_path / "scope", 2, frozenset({"cpu", "memory", "pids"}), crowded=True)]


def test_root_on_a_machine_without_systemd_uses_the_root_of_the_tree(tmp_path):
    tree(tmp_path, root=("cpu memory pids hugetlb", ""))
    found = find_places(V2.format(top=tmp_path), "0::/\n")
    assert found == [Place(tmp_path, 2, frozenset({"cpu", "memory", "pids"}))]


def test_version_1_has_a_tree_for_each_controller(tmp_path):
    (tmp_path / "memory" / "own").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct").mkdir()
    mounts = (
        f"35 31 0:32 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"32 31 0:29 /docker/x {tmp_path}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"36 31 0:33 / {tmp_path}/freezer rw - cgroup cgroup rw,freezer\n"
    )
    found = find_places(mounts, "4:memory:/own\n3:cpu,cpuacct:/docker/x\n2:freezer:/\n")
    assert found == [
        Place(tmp_path / "memory" / "own", 1, frozenset({"memory"})),
        Place(tmp_path / "cpu,cpuacct", 1, frozenset({"cpu"})),
    ]


@pytest.mark.parametrize(
    ("mounts", "text"),
    [
        ("24 1 0:21 / /proc rw - proc proc rw\n", "no control groups are mounted"),
        (V2.format(top="/no/such"), "/no/such: not writable"),
    ],
)
def test_where_there_are_none_it_says_why(mounts, text, not_ours):
    not_ours += [Path("/no/such")]
    with pytest.raises(NoCgroups, match=text):
        find_places(mounts, "0::/\n")
