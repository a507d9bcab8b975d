"""Graders that work and graders that do not, each in its own process."""

import json
import math
import time

import pytest
from bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from aglite.errors import RecipeError
from aglite.rollouts.grade_child import command_result, outcomes
from aglite.rollouts.grading import Grade, GraderError, check_grade


async def graded(tmp_path, grade, agent="", **reward):
    async with Bench(tmp_path, agent, grade=grade, reward=reward) as bench:
        outcome = await bench.run()
        return outcome, bench.log()


async def test_a_grader_gets_the_task_with_its_hidden_part_the_facts_and_what_the_agent_left(tmp_path):
    grade = """
        def grade(task, rollout, workdir):
            assert rollout["exit_code"] == 3 and rollout["cause"].startswith("exit"), rollout
            assert rollout["messages"] == [] and rollout["calls"] == 0
            assert rollout["limits_hit"] == [] and rollout["flags"] == []
            right = (workdir / "answer.txt").read_text() == task["hidden"]["answer"]
            return {"reward": right * 0.5, "breakdown": {"right": right, "length": 2}}
    """
    outcome, _ = await graded(tmp_path, grade, "open('answer.txt', 'w').write('42'); raise SystemExit(3)")
    assert (outcome.state, outcome.reward, outcome.breakdown) == ("failed", 0.5, {"right": 1.0, "length": 2.0})


async def test_what_a_grader_prints_goes_to_the_log_and_not_into_the_result(tmp_path):
    grade = """
        import os, subprocess, sys
        def grade(*_):
            print('{"value": 99}')
            sys.stderr.write('{"value": 98}\\n')
            subprocess.run(["sh", "-c", "for fd in 3 4 5 6 7 8 9; do echo '{\\"value\\": 97}' >&$fd; done 2>/dev/null"])
            os.write(1, bytes(range(256)))
            return 0.5
    """
    async with Bench(tmp_path, "print('agent')", grade=grade) as bench:
        outcome = await bench.run()
        log = bench.run_dir.rollout_log(bench.last, 1).read_bytes()
    assert outcome.reward == 0.5
    assert log.startswith(b"agent\n--- grader ---\n")
    assert b'{"value": 98}' in log


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise KeyError('answer')", "grader: KeyError: 'answer' (grade.py:2)"),
        ("return float('nan')", "grader: returned nan, not a finite number"),
        ("return float('inf')", "grader: returned inf, not a finite number"),
        ("return None", "grader: returned None, not a finite number"),
        ("return 'good'", "grader: returned 'good', not a finite number"),
        ("return {'score': 1}", "grader: returned the keys ['score'], not reward (and breakdown)"),
        ("return {'reward': 1, 'breakdown': {'a': float('nan')}}", "grader: returned as breakdown.a nan"),
        ("return object()", "grader: TypeError: "),
        ("import os; os._exit(7)", "grader: ended without a result (exit code 7)"),
        (
            "import os; print('oh', flush=True); os.kill(os.getpid(), 9)",
            "grader: ended without a result (signal 9): oh",
        ),
        ("raise SystemExit(0)", "grader: SystemExit: 0"),
        ("import sys; sys.stdout.close(); sys.stderr.close(); return 1 / 0", "grader: "),
    ],
)
async def test_a_grader_that_gives_no_number_is_an_error_with_its_cause(tmp_path, body, cause):
    outcome, _ = await graded(tmp_path, f"def grade(task, rollout, workdir):\n    {body}\n")
    assert (outcome.state, outcome.reward) == ("error", None)
    assert outcome.cause.startswith(cause)


async def test_a_grader_that_quotes_a_name_which_is_no_text_is_told_of_as_any_other(tmp_path):
    grade = "import os\ndef grade(task, rollout, workdir):\n    raise ValueError(sorted(os.listdir(workdir))[-1])\n"
    outcome, _ = await graded(tmp_path, grade, "open(b'z\\xff', 'w').close()")
    assert (outcome.state, outcome.cause) == ("error", r"grader: ValueError: z\udcff (grade.py:3)")


async def test_the_traceback_of_a_grader_is_in_the_log(tmp_path):
    outcome, log = await graded(tmp_path, "def grade(*_):\n    return 1 / 0\n")
    assert log.count("ZeroDivisionError") == 2  # it was tried twice
    assert outcome.cause == "grader: ZeroDivisionError: division by zero (grade.py:2)"
    assert outcome.attempt == 1


async def test_a_grader_that_fails_once_is_tried_again(tmp_path):
    grade = """
        from pathlib import Path
        TRIED = Path(__file__).with_name("tried")
        def grade(task, rollout, workdir):
            assert not (workdir / "spoilt").exists(), "each try has a copy of its own"
            (workdir / "spoilt").touch()
            if TRIED.exists():
                return 1
            TRIED.touch()
            raise OSError("busy")
    """
    outcome, _ = await graded(tmp_path, grade)
    assert (outcome.state, outcome.reward) == ("done", 1.0)


async def test_a_grader_that_hangs_is_ended_with_its_children(tmp_path):
    grade = "import subprocess\ndef grade(*_):\n    subprocess.run(['sleep', '100'])\n"
    began = time.monotonic()
    outcome, _ = await graded(tmp_path, grade, timeout_s=0.7)
    assert (outcome.state, outcome.cause) == ("error", "grader: no result within 0.7 s")
    assert time.monotonic() - began < 60


async def test_a_hanging_grader_is_an_error_for_a_failed_agent_too(tmp_path):
    grade = "import time\ndef grade(*_):\n    time.sleep(100)\n"
    outcome, _ = await graded(tmp_path, grade, "raise SystemExit(1)", timeout_s=0.5)
    assert (outcome.state, outcome.reward) == ("error", None)


async def test_a_process_that_a_grader_leaves_in_its_own_session_is_ended(tmp_path):
    grade = "import subprocess\ndef grade(*_):\n    subprocess.Popen(['setsid', 'sleep', '100'])\n    return 1\n"
    async with Bench(tmp_path, grade=grade) as bench:
        assert (await bench.run()).reward == 1.0
        assert bench.alive() == []


async def test_a_grader_floods_its_output(tmp_path):
    outcome, log = await graded(tmp_path, "def grade(*_):\n    print('x' * 20_000_000)\n    return 1\n")
    assert outcome.reward == 1.0
    assert len(log) < 300_000


async def test_a_thread_that_a_grader_leaves_does_not_hold_the_result(tmp_path):
    grade = """
        import threading, time
        def grade(*_):
            threading.Thread(target=time.sleep, args=(100,)).start()
            return 1
    """
    began = time.monotonic()
    outcome, _ = await graded(tmp_path, grade)
    assert outcome.reward == 1.0
    assert time.monotonic() - began < 60


async def test_a_grader_imports_its_neighbours_and_not_what_the_agent_left(tmp_path):
    grade = "import helper, random\ndef grade(*_):\n    return helper.WORTH + hasattr(random, 'forged')\n"
    agent = "open('random.py', 'w').write('forged = 1'); open('helper.py', 'w').write('WORTH = 9')"
    bench = Bench(tmp_path, agent, grade=grade)
    (bench.recipe.folder / "helper.py").write_text("WORTH = 0.5")
    async with bench:
        assert (await bench.run()).reward == 0.5


async def test_numbers_of_numpy_are_numbers(tmp_path):
    grade = "class F:\n    def __float__(self): return 0.25\ndef grade(*_):\n    return {'reward': F()}\n"
    outcome, _ = await graded(tmp_path, grade)
    assert outcome.reward == 0.25


@pytest.mark.parametrize(
    ("source", "grade", "text"),
    [
        ("def grade(: pass", "grade.py:grade", "SyntaxError"),
        ("import no_such_module", "grade.py:grade", r"No module named 'no_such_module' \(grade.py:1\)"),
        ("x = 1", "grade.py:grade", "grade.py has no function 'grade'"),
        ("", "missing.py:grade", "there is no missing.py in"),
        ("", "grade.py", "names no function"),
    ],
)
async def test_a_grader_that_cannot_be_loaded_is_refused_at_the_start(tmp_path, source, grade, text):
    bench = Bench(tmp_path, grade=source, reward={"grade": grade})
    with pytest.raises(RecipeError, match=text):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


DEEP = "[" * 100_000
"""JSON that is nested deeper than any stack."""


def test_a_result_nested_deeper_than_any_stack_is_none():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    for value in (nested, {"reward": nested}, {"reward": 1, "breakdown": nested}):
        with pytest.raises(GraderError, match=r"returned .*something nested very deeply"):
            check_grade(value)
    assert "is not JSON" in command_result("json", 0, DEEP.encode())["raised"]
    report = json.dumps({"token": "t", "started": True, "finished": True}).encode()
    assert outcomes(DEEP.encode() + b"\n" + report, "t") == (set(), set(), True)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), {"reward": 10**400}, {"reward": 1, "breakdown": {"a": 10**400}}],
    ids=["large", "negative", "reward", "breakdown"],
)
def test_a_whole_number_beyond_all_floats_is_none(value):
    with pytest.raises(GraderError, match="not a finite number"):
        check_grade(value)


@given(st.floats() | st.integers(-(10**20), 10**20))
def test_a_number_is_the_reward_if_it_is_finite(value):
    if math.isfinite(value):
        assert check_grade(value) == Grade(float(value))
        assert check_grade({"reward": value, "breakdown": {"part": value}}).breakdown == {"part": float(value)}
    else:
        with pytest.raises(GraderError):
            check_grade(value)
        with pytest.raises(GraderError):
            check_grade({"reward": 0, "breakdown": {"part": value}})
