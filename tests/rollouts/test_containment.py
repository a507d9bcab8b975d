"""Agents that misbehave: what they print, fork, allocate and leave behind. None may reach past its own end."""

import asyncio
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
from bench import Bench, descriptors, is_running, until

MB = 1 << 20


async def test_a_flood_of_output_is_bounded_on_disk_and_in_memory(tmp_path):
    agent = """
        import os
        print("first line", flush=True)
        for _ in range(100): os.write(1, b"x" * (1 << 20))
        print("last line", flush=True)
    """
    async with Bench(tmp_path, agent, limits={"log_bytes": 2 * MB, "wall_s": 280}) as bench:
        process = psutil.Process()
        before = most = process.memory_info().rss
        busy = 0.0
        task = await bench.submit()
        bench.last = task.rollout_id
        while not task.done():
            slept = time.thread_time()  # of this thread alone: others of this machine may keep it waiting
            await asyncio.sleep(0.005)
            busy = max(busy, time.thread_time() - slept)
            most = max(most, process.memory_info().rss)
        outcome = await task
        log = bench.log()
        assert (outcome.state, outcome.flags) == ("done", ["log_cut"])
        assert log.startswith("first line\n") and log.endswith("last line\n")
        assert "bytes left out" in log
        assert len(log) < 2 * MB + 100
        assert most - before < 16 * MB
        assert busy < 0.5


async def test_an_endless_flood_is_slowed_down(tmp_path):
    async with Bench(tmp_path, command=["yes"], limits={"log_bytes": MB, "wall_s": 1.5}) as bench:
        bench.count_time_from(lambda: next(iter(bench.launcher._rollouts.values())).running.left_out)
        assert (await bench.run()).cause == "wall_time: 1.5 s"
        left_out = int(re.search(r"([\d,]+) bytes left out", bench.log())[1].replace(",", ""))
        assert left_out < 150 * MB


async def test_output_that_fits_is_kept_whole(tmp_path):
    agent = "import sys\nfor i in range(20000): print(i, file=[sys.stdout, sys.stderr][i % 2])"
    async with Bench(tmp_path, agent) as bench:
        assert (await bench.run()).flags == []
        assert bench.log().split() == [str(i) for i in range(20000)]


async def test_a_daemon_in_a_session_of_its_own_is_gone_before_grading(tmp_path):
    agent = """
        import os, subprocess, time
        daemon = "import os,time\\nwhile 1: open('alive','a').write('x'); time.sleep(.01)"
        children = [subprocess.Popen(["setsid", "python3", "-c", daemon]) for _ in range(3)]
        for child in children:
            print(child.pid)
            while os.getsid(child.pid) == os.getsid(0): time.sleep(0.01)
        while not os.path.exists("alive"): time.sleep(0.01)
    """
    grade = """
        import time
        def grade(task, rollout, workdir):
            before = (workdir / "alive").stat().st_size
            time.sleep(0.2)
            return float(before == (workdir / "alive").stat().st_size)
    """
    async with Bench(tmp_path, agent, grade=grade) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, ["stragglers"])
        assert not any(is_running(int(pid)) for pid in bench.log().split())


async def test_many_children_and_grandchildren_are_gone(tmp_path):
    agent = """
        import os, time
        for i in range(30):
            if os.fork() == 0:
                if i % 3 == 0: os.setsid()
                if i % 5 == 0: os.setpgid(0, 0) if i % 3 else None
                if os.fork() == 0: os.fork()
                time.sleep(100)
        time.sleep(0.3)
    """
    async with Bench(tmp_path, agent) as bench:
        assert (await bench.run()).state == "done"
        assert bench.alive() == []


async def test_a_child_without_an_environment_ends_with_its_group(tmp_path):
    agent = "import subprocess; print(subprocess.Popen(['env', '-i', 'sleep', '100']).pid)"
    async with Bench(tmp_path, agent) as bench:
        assert (await bench.run()).state == "done"
        pid = int(bench.log())
        await until(lambda: not is_running(pid))


async def test_a_daemon_that_holds_the_output_open_does_not_hold_the_end_back(tmp_path):
    agent = "import subprocess; subprocess.Popen(['setsid', 'sleep', '100'])"
    async with Bench(tmp_path, agent) as bench:
        began = time.monotonic()
        assert (await bench.run()).state == "done"
        assert time.monotonic() - began < 60


async def test_an_agent_that_closes_its_output_costs_no_cpu(tmp_path):
    agent = "import os, time; os.close(1); os.close(2); time.sleep(1)"
    async with Bench(tmp_path, agent) as bench:
        before = time.process_time()
        assert (await bench.run()).state == "done"
        assert time.process_time() - before < 0.5


async def test_memory_over_the_limit_fails_the_agent_only(tmp_path):
    async with Bench(tmp_path, "x = bytearray(400 << 20)", limits={"memory_mb": 200}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("failed", 0.25)
        assert outcome.cause == "memory: limit 200 MB; code 1: MemoryError"


async def test_the_supervisors_own_memory_is_not_the_agents(tmp_path):
    """A child begins as a copy of its parent; its peak as the kernel gives it may be the parent's."""
    ballast = bytearray(os.urandom(1 << 20)) * 300
    async with Bench(tmp_path, "raise SystemExit(3)", limits={"memory_mb": 250}) as bench:
        outcome = await bench.run()
        assert outcome.cause.startswith("exit: code 3")
    del ballast


async def test_address_space_that_is_only_reserved_is_no_memory(tmp_path):
    agent = "import mmap; mmap.mmap(-1, 4 << 30, prot=0)"
    async with Bench(tmp_path, agent, limits={"memory_mb": 200}) as bench:
        assert (await bench.run()).state == "done"


async def test_limits_of_a_process(tmp_path):
    agent = """
        import resource as r
        print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_NOFILE)[1] <= 4096, r.getrlimit(r.RLIMIT_FSIZE)[1] >> 20)
        print(open("/proc/self/oom_score_adj").read().strip())
    """
    async with Bench(tmp_path, agent) as bench:
        await bench.run()
        assert bench.log() == "(0, 0) True 2048\n500\n"


async def test_stdin_is_empty(tmp_path):
    async with Bench(tmp_path, "import sys; print(repr(sys.stdin.read()))") as bench:
        await bench.run()
        assert bench.log() == "''\n"


async def test_no_descriptor_of_the_supervisor_leaks_into_an_agent(tmp_path):
    agent = "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd')))"
    held = os.open(tmp_path, os.O_RDONLY)
    async with Bench(tmp_path, agent) as bench:
        await bench.run()
        assert bench.log() == "[0, 1, 2, 3]\n"  # 3 is the listing itself
    os.close(held)


async def test_an_agent_that_takes_its_permissions_away_is_deleted_all_the_same(tmp_path):
    agent = """
        import os
        os.makedirs("a/b/c"); open("a/b/c/f", "w").write("x")
        for folder in ("a/b/c", "a/b", "a"): os.chmod(folder, 0)
    """
    async with Bench(tmp_path, agent) as bench:
        assert (await bench.run()).state == "done"
        assert list(bench.run_dir.scratch.iterdir()) == []


async def test_folders_deeper_than_any_stack_are_deleted_all_the_same(tmp_path):
    agent = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    try:
        async with Bench(tmp_path, agent) as bench:
            outcome = await bench.run()
            assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, ["oversize"])
            assert list(bench.run_dir.scratch.iterdir()) == []
    finally:  # pytest could not delete them either
        subprocess.run(["rm", "-rf", tmp_path / "run"], check=True)  # noqa: ASYNC221


async def test_a_link_that_an_agent_leaves_is_not_followed_by_the_deletion(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    async with Bench(tmp_path, f"import os; os.symlink({str(precious)!r}, 'link')") as bench:
        await bench.run()
    assert (precious / "file").exists()


async def test_a_shell_agent_and_its_interpreter(tmp_path):
    bench = Bench(tmp_path, command=["./run.sh", "a b"], files=["run.sh"])
    script = bench.recipe.folder / "run.sh"
    script.write_text('#!/bin/sh\necho "<$1> $(basename "$PWD")"\n')
    script.chmod(0o755)
    async with bench:
        assert (await bench.run()).state == "done"
        assert bench.log() == "<a b> work\n"
        script.write_text("#!/no/such/interpreter\n")
        assert "asks for the interpreter '/no/such/interpreter'" in (await bench.run()).cause


async def test_a_hundred_rollouts_through_16_slots_leave_nothing(tmp_path):
    agent = """
        import os, subprocess, sys, time
        n = int(os.environ["N"])
        if n % 10 == 0:
            child = subprocess.Popen(["setsid", "sleep", "100"])
            while os.getsid(child.pid) == os.getsid(0): time.sleep(0.01)
        if n % 10 == 1: subprocess.Popen(["sleep", "100"])
        sys.exit(n % 10 == 2)
    """
    before = descriptors()
    async with Bench(tmp_path, agent, env={"N": "{task.n}"}, concurrency=16) as bench:
        tasks = [await bench.submit({"n": n}) for n in range(100)]
        outcomes = await asyncio.gather(*tasks)
        assert [outcome.state for outcome in outcomes].count("failed") == 10
        assert [outcome.state for outcome in outcomes].count("done") == 90
        assert sum("stragglers" in outcome.flags for outcome in outcomes) == 10
        assert bench.alive() == []
        assert bench.launcher.running == []
        # each thread that reads the store has a connection of its own, and threads are as many as processors allow
        assert len([link for link in descriptors() if "aglite.db" not in link]) < len(before) + 20
        assert bench.store.counts_by_state()["done"] == 90


async def test_waiting_for_32_agents_costs_next_to_no_cpu(tmp_path):
    async with Bench(tmp_path, command=["sleep", "100"], concurrency=32) as bench:
        tasks = [await bench.submit() for _ in range(32)]
        await until(lambda: bench.launcher.counts()["running"] == 32)
        used = []
        while not used or (used[-1] >= 0.1 and len(used) < 5):  # the first one may see the end of their beginning
            before = time.process_time()
            await asyncio.sleep(2)
            used.append(time.process_time() - before)
        assert min(used) < 0.1, used
        await bench.launcher.stop()
        await asyncio.gather(*tasks)


async def test_what_an_earlier_supervisor_left_is_swept_at_the_start(tmp_path):
    first = Bench(tmp_path, "import time; time.sleep(100)")
    async with first:
        task = await first.submit()
        await until(lambda: first.alive())
        pid = first.alive()[0]
        folder = Path(f"/proc/{pid}/cwd").resolve().parent
        second = Bench(tmp_path, store=first.store)
        await second.launcher.start()
        assert not is_running(pid)
        assert not folder.exists()
        await second.launcher.stop()
        await task
