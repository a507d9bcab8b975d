"""What every place must do alike, with real agents in it."""

import asyncio
import os
import re
import time
from dataclasses import replace

import pytest
from bench import Bench, until

from aglite.rollouts import attempt

MB = 1 << 20


async def test_an_agent_runs_to_its_end_and_its_files_reach_the_grader(tmp_path, place):
    agent = """
        import json, os, pathlib
        task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
        pathlib.Path("deep/er").mkdir(parents=True)
        pathlib.Path("deep/er/answer").write_text(task["word"])
        pathlib.Path("run.sh").write_text("#!/bin/sh")
        os.chmod("run.sh", 0o755)
        os.symlink("deep/er/answer", "link")
        pathlib.Path(os.environ["HOME"], "note").write_text("x")
        pathlib.Path(os.environ["TMPDIR"], "note").write_text("x")
        print("done", sorted(os.listdir()))
    """
    grade = """
        import os
        def grade(task, rollout, workdir):
            assert (workdir / "link").read_text() == "tea"
            assert os.access(workdir / "run.sh", os.X_OK) and not os.access(workdir / "link", os.X_OK)
            assert "note" not in os.listdir(workdir)
            return float((workdir / "deep" / "er" / "answer").read_text() == task["public"]["word"])
    """
    async with Bench(tmp_path, agent, grade=grade, **place) as bench:
        outcome = await bench.run({"word": "tea"})
        assert (outcome.state, outcome.cause, outcome.reward, outcome.flags) == ("done", "", 1.0, [])
        assert bench.log() == "done ['agent.py', 'deep', 'link', 'run.sh']\n"
        again = await bench.run({"word": "tea"})
        assert (again.reward, bench.log()) == (1.0, "done ['agent.py', 'deep', 'link', 'run.sh']\n")


async def test_an_agent_reads_its_standard_input_to_its_end(tmp_path, place):
    """A harness may be told its task in this way."""
    said = "do \u00fc\n" * 20_000
    agent = "import pathlib, sys; pathlib.Path('read').write_text(sys.stdin.read())"
    grade = """
        def grade(task, rollout, workdir):
            return float((workdir / "read").read_text() == "do \u00fc\\n" * 20_000)
    """
    async with Bench(tmp_path, agent, grade=grade, **place) as bench:
        start = bench.launcher._backend.start
        bench.launcher._backend.start = lambda launch: start(replace(launch, stdin=said))
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.reward) == ("done", "", 1.0)


async def test_an_agent_that_does_not_read_its_standard_input_ends_all_the_same(tmp_path, place):
    async with Bench(tmp_path, "print('done')", **place) as bench:
        start = bench.launcher._backend.start
        bench.launcher._backend.start = lambda launch: start(replace(launch, stdin="x" * (4 * MB)))
        assert (await bench.run()).state == "done"


async def test_output_is_in_the_log_while_the_agent_runs(tmp_path, place):
    agent = "import sys, time\nprint('thinking')\nprint('aloud', file=sys.stderr)\ntime.sleep(300)"
    async with Bench(tmp_path, agent, limits={"wall_s": 280}, **place) as bench:
        task = await bench.submit()
        bench.last = task.rollout_id
        path = bench.run_dir.rollout_log(bench.last, 1)
        await until(lambda: path.exists() and sorted(path.read_text().split()) == ["aloud", "thinking"])
        assert bench.launcher.kill(bench.last)
        outcome = await task
        assert (outcome.state, outcome.cause, outcome.reward) == ("cancelled", "killed", None)


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raise SystemExit('no luck')", "exit: code 1: no luck"),
        ("raise SystemExit(77)", "exit: code 77"),
        ("import os; os.kill(os.getpid(), 11)", "signal: SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", ("signal: signal 40", "exit: code 168")),
    ],
)
async def test_how_an_agent_failed(tmp_path, place, agent, cause):
    async with Bench(tmp_path, agent, **place) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("failed", 0.25)
        assert outcome.cause in ((cause,) if isinstance(cause, str) else cause)


async def test_at_its_wall_time_an_agent_may_write_down_what_it_has(tmp_path, place, monkeypatch):
    monkeypatch.setattr(attempt, "TIME_UP_GRACE_S", 60.0)
    agent = """
        import signal, time
        def give_up(*_):
            open("draft", "w").write("x")
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, give_up)
        print("ready")
        time.sleep(100)
    """
    grade = "def grade(task, rollout, workdir):\n    return 0.5 * (workdir / 'draft').exists()\n"
    async with Bench(tmp_path, agent, grade=grade, limits={"wall_s": 1.5}, **place) as bench:
        bench.count_time_from(lambda: bench.has_printed("ready"))
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.reward) == ("failed", "wall_time: 1.5 s", 0.5)


async def test_an_agent_that_ignores_sigterm_is_ended_too(tmp_path, place):
    agent = "import signal, time; signal.signal(15, signal.SIG_IGN); print('no'); time.sleep(300)"
    async with Bench(tmp_path, agent, limits={"wall_s": 1}, **place) as bench:
        bench.count_time_from(lambda: bench.has_printed("no"))
        began = time.monotonic()
        assert (await bench.run()).cause == "wall_time: 1 s"
        assert time.monotonic() - began < 120
        assert bench.log() == "no\n"


async def test_a_daemon_is_gone_before_grading(tmp_path, place):
    agent = """
        import os, subprocess, time
        daemon = "import os, time\\nwhile 1: open('alive','a').write('x'); open(f'p{os.getpid()}','w'); time.sleep(.01)"
        for _ in range(3):
            subprocess.Popen(["setsid", "python3", "-c", daemon])
        while sum(name[0] == "p" for name in os.listdir()) < 3: time.sleep(0.05)
    """
    grade = """
        import time
        def grade(task, rollout, workdir):
            before = (workdir / "alive").stat().st_size
            time.sleep(0.2)
            return float(before == (workdir / "alive").stat().st_size)
    """
    async with Bench(tmp_path, agent, grade=grade, **place) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", 1.0)


async def test_a_flood_of_output_is_bounded(tmp_path, place):
    agent = """
        import os
        print("first line", flush=True)
        for _ in range(30): os.write(1, b"x" * (1 << 20))
        print("last line", flush=True)
    """
    async with Bench(tmp_path, agent, limits={"log_bytes": 2 * MB, "wall_s": 280}, **place) as bench:
        outcome = await bench.run()
        log = bench.log()
        assert (outcome.state, outcome.flags) == ("done", ["log_cut"])
        assert log.startswith("first line\n") and log.endswith("last line\n")
        assert int(re.search(r"([\d,]+) bytes left out", log)[1].replace(",", "")) > 20 * MB
        assert len(log) < 2 * MB + 100


async def test_memory_is_bounded(tmp_path, place):
    agent = "import time; print('eating'); hold = [bytearray(b'x' * (1 << 20)) for _ in range(2000)]; time.sleep(100)"
    async with Bench(tmp_path, agent, limits={"memory_mb": 200}, **place) as bench:
        outcome = await bench.run()
        assert outcome.state == "failed"
        assert outcome.cause.startswith("memory: limit 200 MB")


async def test_many_at_once_are_kept_apart(tmp_path, place):
    agent = """
        import os, json
        task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
        assert os.listdir() == ["agent.py"], os.listdir()
        open("answer", "w").write(f"{task['n']} {os.environ['AGLITE_ROLLOUT_ID']}")
    """
    grade = """
        def grade(task, rollout, workdir):
            return float((workdir / "answer").read_text() == f"{task['public']['n']} {rollout['id']}")
    """
    async with Bench(tmp_path, agent, grade=grade, concurrency=4, **place) as bench:
        outcomes = await asyncio.gather(*[await bench.submit({"n": n}) for n in range(12)])
        assert {(outcome.state, outcome.reward) for outcome in outcomes} == {("done", 1.0)}


@pytest.mark.parametrize("replaced", ["", "os.symlink('/etc', here)", "open(here, 'w').close()", "os.mkfifo(here)"])
async def test_an_agent_without_its_working_directory_has_left_nothing(tmp_path, place, replaced):
    """It would be a way out of a bad reward if that were a failure of ours, and tried again."""
    agent = f"""
        import os, shutil
        here = os.getcwd()
        os.chdir("/")
        shutil.rmtree(here)
        {replaced}
        raise SystemExit(1)
    """
    grade = """
        import os
        def grade(task, rollout, workdir):
            return -1.0 if os.listdir(workdir) in ([], ["agent.py"]) else 1.0
    """
    async with Bench(tmp_path, agent, grade=grade, **place) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.attempt) == ("failed", "exit: code 1", 1)
        assert (outcome.reward, outcome.flags) == (-1.0, ["special_files"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_200_rollouts_32_at_once_leave_nothing(tmp_path, place):
    """What a place has beside the scratch folder is looked for at the end of `place`."""
    agent = 'printf %s "$AGLITE_ROLLOUT_ID" >answer'
    grade = "def grade(t, r, workdir):\n    return float((workdir / 'answer').read_text() == r['id'])\n"
    async with Bench(tmp_path, grade=grade, concurrency=32, command=["sh", "-c", agent], **place) as bench:
        tasks = [await bench.submit() for _ in range(200)]
        most = 0
        while not all(task.done() for task in tasks):
            counts = bench.launcher.counts()
            most = max(most, counts["starting"] + counts["running"])
            await asyncio.sleep(0.01)
        outcomes = [task.result() for task in tasks]
        assert {(one.state, one.reward, one.attempt) for one in outcomes} == {("done", 1.0, 1)}
        assert 2 <= most <= 32
        assert bench.alive() == []
    assert os.listdir(bench.run_dir.scratch) == []


async def test_stop_in_the_middle_cancels_all_and_leaves_nothing(tmp_path, place):
    agent = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '100']); time.sleep(100)"
    async with Bench(tmp_path, agent, concurrency=3, **place) as bench:
        tasks = [await bench.submit() for _ in range(6)]
        await until(lambda: bench.launcher.counts()["running"] == 3)
        await bench.launcher.stop()
        outcomes = await asyncio.gather(*tasks)
        assert {(outcome.state, outcome.cause) for outcome in outcomes} == {("cancelled", "stopped")}
        assert os.listdir(bench.run_dir.scratch) == []
