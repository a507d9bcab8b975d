"""Nothing outlives the supervisor, however it ends."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench import is_running, until

from aglite.rollouts import reap_child
from aglite.rollouts.reaper import MARK, Reaper

STAND_IN = Path(__file__).parents[1] / "helpers" / "supervisor_stand_in.py"


def marked(folder: Path) -> list[int]:
    """Processes that carry the mark of a supervisor of this run directory."""
    ending = os.fsencode(f"@{(folder / 'run').resolve()}\0")
    return reap_child.find(lambda environ: ending in environ and MARK.encode() in environ)


@pytest.fixture
async def stand_in(tmp_path):
    """(a supervisor with three agents and a worker, the worker's id, the reaper's id)"""
    process = sleeper([sys.executable, STAND_IN, tmp_path])
    try:
        await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), 120)
        worker, reaper = map(int, (tmp_path / "ready").read_text().split())
        await until(lambda: len(marked(tmp_path)) == 3 * 5)  # one more of each agent is about to hide
        assert is_running(worker)
        yield process, worker, reaper
    finally:
        process.kill()
        process.wait()


def sleeper(command=("sleep", "300"), **more) -> subprocess.Popen:
    return subprocess.Popen(command, start_new_session=True, **more)


async def test_sigkill_of_the_supervisor_ends_everything_within_seconds(tmp_path, stand_in):
    process, worker, reaper = stand_in
    process.kill()
    await until(lambda: not marked(tmp_path) and not is_running(worker) and not is_running(reaper), 30)
    assert "supervisor" in (tmp_path / "run" / "logs" / "reaper.log").read_text()


async def test_ctrl_c_does_not_reach_agents_and_reaper(tmp_path, stand_in):
    process, worker, reaper = stand_in
    os.killpg(process.pid, signal.SIGINT)
    await asyncio.sleep(0.2)
    assert len(marked(tmp_path)) == 3 * 5
    process.kill()
    await until(lambda: not marked(tmp_path) and not is_running(worker) and not is_running(reaper), 30)


async def test_what_a_killed_reaper_missed_is_swept_at_the_next_start(tmp_path, stand_in):
    process, worker, reaper = stand_in
    os.kill(reaper, signal.SIGKILL)
    process.kill()
    process.wait()
    await asyncio.sleep(0.3)
    left = marked(tmp_path)
    other = sleeper(env={MARK: f"abc@{tmp_path}/run2"})
    successor = Reaper(tmp_path / "run")
    await successor.start()
    await successor.stop()
    try:
        assert len(left) == 3 * 5
        assert not any(is_running(pid) for pid in left)
        assert is_running(other.pid), "that is another run's"
    finally:
        other.kill()
        other.wait()
        os.kill(worker, signal.SIGKILL)  # known to the killed reaper only


@pytest.fixture
async def reaper(tmp_path):
    (tmp_path / "logs").mkdir()
    reaper = Reaper(tmp_path)
    await reaper.start()
    yield reaper
    await reaper.stop()


async def test_a_clean_stop_leaves_others_alone(reaper):
    child = sleeper(env=reaper.environment)
    reaper.add(child.pid)
    pid = reaper.pid
    await reaper.stop()
    assert not is_running(pid) and is_running(child.pid)
    child.kill()
    child.wait()


async def test_a_killed_reaper_is_started_again_and_told_all_groups(reaper):
    groups = [sleeper() for _ in range(2)]
    reaper.add(groups[0].pid)
    first = reaper.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: not is_running(first))
    reaper.add(groups[1].pid)
    assert reaper.pid != first
    reaper._child.stdin.close()  # what the supervisor's death looks like to it
    for group in groups:
        assert group.wait(60) == -signal.SIGKILL
    reaper._child.wait(60)
    reaper._child = None


async def test_a_group_that_was_removed_is_left_alone(reaper):
    child = sleeper()
    reaper.add(child.pid)
    reaper.remove(child.pid)
    reaper._child.stdin.close()
    reaper._child.wait(60)
    reaper._child = None
    assert is_running(child.pid)
    child.kill()
    child.wait()


def test_a_number_that_passed_to_another_process_is_not_killed():
    child = sleeper()
    reap_child.end_group(child.pid, reap_child.stat_of(child.pid, reap_child.STARTED) - 1)
    assert is_running(child.pid)
    reap_child.end_group(child.pid, reap_child.stat_of(child.pid, reap_child.STARTED))
    assert child.wait(60) == -signal.SIGKILL


def test_the_reaper_starts_fast_and_needs_the_standard_library_only():
    command = [sys.executable, "-I", "-S", "-X", "importtime", reap_child.__file__, "X=1", os.devnull, str(os.getpid())]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, input=b".\n", stderr=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1, "of the processor's time"
    assert b"subprocess" not in done.stderr and b"aglite" not in done.stderr
