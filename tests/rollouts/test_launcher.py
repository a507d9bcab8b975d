"""Rollouts from submission to outcome, with real agents as processes."""

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from bench import Bench, descriptors, until

from aglite.errors import RecipeError
from aglite.rollouts import process


async def test_an_agent_that_exits_with_0_is_done_and_graded(tmp_path):
    async with Bench(tmp_path, "print('hello')") as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.reward, outcome.flags) == ("done", "", 1.0, [])
        assert bench.states() == ["queued", "starting", "running", "grading", "done"]
        assert [change["state"] for change in bench.changes] == ["starting", "running", "grading", "done"]
        assert bench.log() == "hello\n"
        assert bench.store.rollout(bench.last)["finished_at"] is not None


async def test_an_agent_that_exits_with_1_failed_but_is_graded(tmp_path):
    async with Bench(tmp_path, "raise SystemExit('no luck')") as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.reward) == ("failed", "exit: code 1: no luck", 0.25)


@pytest.mark.parametrize("misread", [0.98, 1.0, 1.02])
async def test_what_the_supervisor_itself_uses_is_not_the_agents(tmp_path, monkeypatch, misread):
    """The kernel keeps our peak as that of a child, and reads it a little differently every time."""

    def roughly(who, read=resource.getrusage):
        usage = read(who)
        return SimpleNamespace(ru_maxrss=int(usage.ru_maxrss * misread))

    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    monkeypatch.setattr(process.resource, "getrusage", roughly)
    async with Bench(tmp_path, "raise SystemExit('no luck')", limits={"memory_mb": own_mb}) as bench:
        assert (await bench.run()).cause == "exit: code 1: no luck"


USES_WHAT_IT_MAY = """
import asyncio, sys
from pathlib import Path
from bench import Bench

async def main():
    agent = "held = b'x' * (470 << 20); raise SystemExit('no luck')"
    async with Bench(Path(sys.argv[1]), agent, limits={"memory_mb": 500}) as bench:
        print((await bench.run()).cause)

asyncio.run(main())
"""


def test_an_agent_that_used_what_it_may_failed_for_memory(tmp_path):
    """Launched from a small process: it must have used clearly more than that one, which the tests' own may have used
    too much for. The shell is between them, as what we start begins with our peak."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", USES_WHAT_IT_MAY, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "memory: limit 500 MB; code 1: no luck\n", done.stderr


async def test_on_failure_zero_scores_a_failure_without_looking(tmp_path):
    grade = "def grade(*_):\n    raise RuntimeError\n"
    async with Bench(tmp_path, "raise SystemExit(3)", grade=grade, reward={"on_failure": "zero"}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.reward) == ("failed", "exit: code 3", 0.0)
        assert "grading" not in bench.states()


async def test_a_failure_that_cannot_be_graded_scores_0(tmp_path):
    grade = "def grade(task, rollout, workdir):\n    return float((workdir / 'answer').read_text())\n"
    async with Bench(tmp_path, "raise SystemExit(1)", grade=grade) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("failed", 0.0)
        assert "ungraded" in outcome.flags


async def test_bringing_the_grader_down_is_a_way_out_only_where_the_recipe_leaves_it(tmp_path):
    """The first answer can be graded, the second makes the grader raise, the third is no number."""
    agent = "import os; open('answer', 'w').write(os.environ['ANSWER'])"
    grade = """
        def grade(task, rollout, workdir):
            return float((workdir / "answer").read_text())
    """
    for on_error, expected in (("error", ("error", None)), ("zero", ("done", 0.0))):
        settings = {"reward": {"on_error": on_error}, "env": {"ANSWER": "{task.answer}"}}
        (folder := tmp_path / on_error).mkdir()
        async with Bench(folder, agent, grade=grade, **settings) as bench:
            broken = await bench.run({"answer": "x"})  # the grader has not graded any yet
            assert (broken.state, broken.reward) == ("error", None) and broken.cause.startswith("grader: ValueError")
            assert (await bench.run({"answer": "0.5"})).reward == 0.5
            for answer in ("x", "nan"):
                outcome = await bench.run({"answer": answer})
                assert (outcome.state, outcome.reward) == expected, answer
                assert ("ungraded" in outcome.flags) == (on_error == "zero")
                assert on_error == "error" or "--- not graded ---" in bench.log()


async def test_an_agent_ended_by_a_signal_failed(tmp_path):
    async with Bench(tmp_path, "import os; os.kill(os.getpid(), 11)") as bench:
        assert (await bench.run()).cause == "signal: SIGSEGV"


async def test_what_an_agent_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_SUPERVISOR", "x")
    agent = """
        import json, os
        task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
        json.dump({"env": dict(os.environ), "task": task, "files": sorted(os.listdir())}, open("seen.json", "w"))
    """
    grade = """
        import json, shutil
        def grade(task, rollout, workdir):
            shutil.copy(workdir / "seen.json", task["public"]["out"])
            return 0
    """
    public = {"out": str(tmp_path / "seen.json"), "topic": "tea", "n": [1, 2]}
    env = {"TOPIC": "{task.topic}", "N": "n={task.n}", "OTHER": "{x}"}
    async with Bench(tmp_path, agent, grade=grade, env=env) as bench:
        await bench.run(public)
        seen = json.loads((tmp_path / "seen.json").read_text())
    env = seen["env"]
    assert seen["task"] == public
    assert seen["files"] == ["agent.py"]
    assert env["OPENAI_BASE_URL"] == f"http://127.0.0.1:1/rollouts/{bench.last}/v1"
    assert env["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:1/rollouts/{bench.last}"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"] != ""
    assert env["ANTHROPIC_MODEL"] == "test-model"
    assert env["AGLITE_ROLLOUT_ID"] == bench.last
    assert (env["TOPIC"], env["N"], env["OTHER"]) == ("tea", "n=[1, 2]", "{x}")
    assert "SECRET_OF_THE_SUPERVISOR" not in env
    assert "42" not in json.dumps(seen["task"])


async def test_a_missing_field_of_a_task_is_named(tmp_path):
    async with Bench(tmp_path, env={"TOPIC": "{task.topic}"}) as bench:
        outcome = await bench.run({"word": 1})
        assert outcome.state == "error"
        assert outcome.cause.startswith("recipe: agent.env.TOPIC: task 't' has no 'topic'")
        assert "word" in outcome.cause
        assert outcome.attempt == 1


async def test_a_command_that_is_not_there_is_said_once(tmp_path):
    async with Bench(tmp_path, command=["no-such-program"]) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt, outcome.reward) == ("error", 1, None)
        assert "recipe: agent.command: there is no program 'no-such-program'" in outcome.cause


async def test_a_hanging_agent_is_ended_at_its_wall_time(tmp_path):
    agent = "import time; open('draft', 'w').write('x'); print('thinking'); time.sleep(100)"
    grade = "def grade(task, rollout, workdir):\n    return 0.5 * (workdir / 'draft').exists()\n"
    async with Bench(tmp_path, agent, grade=grade, limits={"wall_s": 2}) as bench:
        bench.count_time_from(lambda: bench.has_printed("thinking"))
        began = time.monotonic()
        outcome = await bench.run()
        assert time.monotonic() - began < 60
        assert (outcome.state, outcome.cause, outcome.reward) == ("failed", "wall_time: 2 s", 0.5)
        assert outcome.flags == ["limit:wall_s"]
        assert bench.log() == "thinking\n"


async def test_an_agent_that_ignores_sigterm_is_ended_too(tmp_path):
    agent = "import signal, time; signal.signal(15, signal.SIG_IGN); print('no'); time.sleep(100)"
    async with Bench(tmp_path, agent, limits={"wall_s": 0.5}) as bench:
        bench.count_time_from(lambda: bench.has_printed("no"))
        began = time.monotonic()
        outcome = await bench.run()
        assert outcome.cause == "wall_time: 0.5 s"
        assert time.monotonic() - began < 60


async def test_time_held_does_not_count(tmp_path):
    async with Bench(tmp_path, "import time; time.sleep(1.5)", limits={"wall_s": 0.6}) as bench:
        bench.gateway.on_open = lambda session, _: setattr(session, "held_s", 250.0)
        assert (await bench.run()).state == "done"


async def test_no_calls_is_a_flag(tmp_path):
    async with Bench(tmp_path) as bench:
        bench.gateway.on_open = lambda session, _: setattr(session, "calls", 0)
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 1.0, ["no_calls"])


async def test_a_limit_of_the_gateway_is_the_cause_only_if_the_agent_gave_up(tmp_path):
    async with Bench(
        tmp_path, "import os; raise SystemExit(int(os.environ['CODE']))", env={"CODE": "{task.code}"}
    ) as b:
        b.gateway.on_open = lambda session, _: session.limits_hit.add("calls")
        done, failed = await b.run({"code": 0}), await b.run({"code": 1})
        assert (done.state, done.cause, done.flags) == ("done", "", ["limit:calls"])
        assert (failed.state, failed.flags) == ("failed", ["limit:calls"])
        assert failed.cause.startswith("calls: 32")


async def test_an_error_of_ours_is_tried_again(tmp_path):
    async with Bench(tmp_path) as bench:

        def on_open(session, number):
            session.infra_error = "engine is down" if number < 3 else None

        bench.gateway.on_open = on_open
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt, outcome.reward) == ("done", 3, 1.0)
        assert bench.states().count("queued") == 3
        rows = bench.store.rollout_states(bench.last)
        assert [r["cause"] for r in rows if r["state"] == "queued"] == ["", *["engine: engine is down"] * 2]


async def test_errors_of_ours_end_in_error_after_the_last_attempt(tmp_path):
    async with Bench(tmp_path, "raise SystemExit(1)", attempts=2) as bench:
        bench.gateway.on_open = lambda session, _: setattr(session, "infra_error", "engine is down")
        outcome = await bench.run()
        assert (outcome.state, outcome.cause, outcome.attempt) == ("error", "engine: engine is down", 2)
        assert outcome.reward is None


async def test_attempts_go_on_counting_where_the_store_has_them(tmp_path):
    async with Bench(tmp_path) as bench:
        task = await bench.submit()
        await task
        await bench.store.set_rollout_state(task.rollout_id, "queued")
        again = bench.launcher.submit(task.rollout_id, {"id": "t", "public": {}, "hidden": {}}, "train")
        assert (await again).attempt == 2
        assert [opened["attempt"] for opened in bench.gateway.opened] == [1, 2]


async def test_validation_sampling_and_seed_reach_the_session(tmp_path):
    async with Bench(tmp_path) as bench:
        await bench.run(split="val", seed=7)
        assert bench.gateway.opened[0]["sampling"] is bench.recipe.sampling.val
        assert bench.gateway.opened[0]["seed"] == 7


async def test_kill_while_running(tmp_path):
    async with Bench(tmp_path, "import time; time.sleep(100)") as bench:
        task = await bench.submit()
        await until(lambda: bench.launcher.counts()["running"])
        assert bench.launcher.running == [task.rollout_id]
        assert bench.launcher.kill(task.rollout_id)
        outcome = await task
        assert (outcome.state, outcome.cause, outcome.reward) == ("cancelled", "killed", None)
        assert bench.alive() == []
        assert not bench.launcher.kill(task.rollout_id)


async def test_cancelling_the_task_kills_the_rollout(tmp_path):
    async with Bench(tmp_path, "import time; time.sleep(100)") as bench:
        task = await bench.submit()
        await until(lambda: bench.launcher.counts()["running"])
        task.cancel()
        await until(lambda: not bench.launcher.running)
        assert bench.store.rollout(task.rollout_id)["state"] == "cancelled"
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_kill_while_grading(tmp_path):
    grade = "import time\ndef grade(*_):\n    time.sleep(100)\n"
    async with Bench(tmp_path, grade=grade, reward={"timeout_s": 90}) as bench:
        task = await bench.submit()
        await until(lambda: bench.launcher.counts()["grading"])
        bench.launcher.kill(task.rollout_id)
        assert (await task).state == "cancelled"


async def test_pause_holds_what_is_queued(tmp_path):
    async with Bench(tmp_path) as bench:
        bench.launcher.pause()
        task = await bench.submit()
        await asyncio.sleep(0.3)
        assert bench.launcher.counts()["queued"] == 1
        bench.launcher.resume()
        assert (await task).state == "done"


async def test_slots_go_to_the_oldest_and_bound_what_runs(tmp_path):
    async with Bench(tmp_path, "import time; time.sleep(0.2)", concurrency=2) as bench:
        most = 0

        def watch(change):
            nonlocal most
            counts = bench.launcher.counts()
            most = max(most, counts["starting"] + counts["running"])

        bench.launcher._on_change = lambda change: (bench.changes.append(change), watch(change))
        tasks = [await bench.submit() for _ in range(6)]
        await asyncio.gather(*tasks)
        assert most == 2
        started = [change["id"] for change in bench.changes if change["state"] == "starting"]
        assert started == [task.rollout_id for task in tasks]


async def test_stop_in_the_middle_cancels_all_and_leaves_nothing(tmp_path):
    agent = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '100']); time.sleep(100)"
    async with Bench(tmp_path, agent, concurrency=3) as bench:
        tasks = [await bench.submit() for _ in range(8)]
        await until(lambda: bench.launcher.counts()["running"] == 3 and len(bench.alive()) >= 6)
        await bench.launcher.stop()
        outcomes = await asyncio.gather(*tasks)
        assert {(outcome.state, outcome.cause) for outcome in outcomes} == {("cancelled", "stopped")}
        assert bench.alive() == []
        assert (await (await bench.submit())).state == "cancelled"


@pytest.mark.parametrize(
    ("agent_section", "text"),
    [
        ({"command": ["python", "agnet.py"]}, "no 'agnet.py'"),
        ({"files": ["missing"]}, "no 'missing'"),
        ({"files": ["../secrets"]}, "not inside"),
        ({"files": ["."]}, "'train.jsonl', which tasks.train names"),
        ({"files": ["grade.py"]}, "'grade.py', which reward.grade names"),
        ({"env": {"OPENAI_API_KEY": "x"}}, "agent.env.OPENAI_API_KEY"),
    ],
)
async def test_a_recipe_that_cannot_work_is_refused_at_the_start(tmp_path, agent_section, text):
    bench = Bench(tmp_path, **agent_section)
    with pytest.raises(RecipeError, match=text):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


async def test_files_and_folders_of_the_recipe_reach_the_agent(tmp_path):
    agent = "import lib.tool, pathlib; assert pathlib.Path('data/x.txt').read_text() == 'x'; lib.tool.go()"
    bench = Bench(tmp_path, agent, files=["lib", "data/x.txt"])
    for name, text in {"lib/tool.py": "def go(): print('went')", "data/x.txt": "x", "data/y.txt": "y"}.items():
        file = bench.recipe.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    async with bench:
        assert (await bench.run()).state == "done"
        assert bench.log() == "went\n"


async def test_a_machine_that_cannot_start_an_agent_is_infrastructure(tmp_path):
    async with Bench(tmp_path, attempts=2) as bench:
        bench.run_dir.scratch.rmdir()
        bench.run_dir.scratch.write_text("in the way")
        outcome = await bench.run()
        assert (outcome.state, outcome.attempt) == ("error", 2)
        assert outcome.cause.startswith("launch: ") and "Not a directory" in outcome.cause
        bench.run_dir.scratch.unlink()
        bench.run_dir.scratch.mkdir()
        assert (await bench.run()).state == "done"


async def test_without_free_descriptors_nothing_starts_and_nothing_leaks(tmp_path):
    # each further thread that reads the store would need descriptors, and find none at some other place each time
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with Bench(tmp_path, attempts=1) as bench:
        await bench.run()
        before = descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for spare in range(1, 10, 2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + spare, hard))
            try:
                outcome = await bench.run()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert outcome.state in ("error", "done")
            assert outcome.state == "done" or outcome.cause.startswith(("launch: ", "grader: "))
            assert bench.alive() == []
        # each thread that reads the store has a connection of its own
        assert {link for link in descriptors() if "aglite.db" not in link} <= set(before)


async def test_an_agent_that_cannot_be_watched_is_ended_and_forgotten(tmp_path, monkeypatch):
    """Its number is another's later: the reaper must not keep it."""

    def none_left(pid):
        raise OSError(errno.EMFILE, "Too many open files")

    async with Bench(tmp_path, "import time; time.sleep(100)", attempts=1) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(process.os, "pidfd_open", none_left)
            outcome = await bench.run()
        assert (outcome.state, outcome.cause) == ("error", "launch: [Errno 24] Too many open files")
        assert bench.alive() == [] and bench.launcher._reaper._groups == set()


async def test_a_full_disk_is_said(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "x", disk]).returncode:  # noqa: ASYNC221
        pytest.skip("needs the right to mount a tmpfs")
    try:
        bench = Bench(tmp_path, attempts=1, files=["big"])
        (bench.recipe.folder / "big").write_bytes(bytes(1 << 20))
        async with bench:
            bench.launcher._backend._scratch = disk
            outcome = await bench.run()
            assert outcome.state == "error"
            assert outcome.cause.startswith("launch: ") and "No space left on device" in outcome.cause
            assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)  # noqa: ASYNC221
