"""Commands and tests as graders, repeated gradings, and what the recipe makes of flags."""

import os
import secrets
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from bench import Bench

from aglite.errors import RecipeError
from aglite.rollouts import grade_child, reap_child
from aglite.rollouts.grading import Grade, combined

SUM = "def add(a, b):\n    return a + b\n"
TESTS = """
import pytest
from calc import add
def test_adds(): assert add(2, 3) == 5
@pytest.mark.parametrize("n", [0, 1])
def test_zero(n): assert add(n, 0) == n
def test_old(): assert add(0, 0) == 0
"""


def bench_for(tmp_path, agent, reward, made=None, **section):
    bench = Bench(tmp_path, agent, reward={"grade": None, **reward}, **section)
    for name, text in (made or {}).items():
        file = bench.recipe.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        if text.startswith("#!"):
            file.chmod(0o755)
    return bench


def writes(**files):
    return "import os\n" + "\n".join(
        f"os.makedirs(os.path.dirname({name!r}) or '.', exist_ok=True); open({name!r}, 'w').write({text!r})"
        for name, text in files.items()
    )


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_the_exit_code_of_a_command(tmp_path, answer, reward):
    script = """#!/bin/sh
        echo '{"reward": 0.7}'
        grep -q '"answer": "42"' "$AGLITE_TASK_FILE" || exit 3
        grep -q '"exit_code": 0' "$AGLITE_ROLLOUT_FILE" || exit 4
        test -z "$SECRET_OF_THE_USER" || exit 5
        test "$(cat "$AGLITE_WORKDIR/answer")" = 42
    """
    command = {"command": ["./grade.sh"]}
    async with bench_for(tmp_path, writes(answer=answer), command, {"grade.sh": textwrap.dedent(script)}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", reward, [])
        assert '{"reward": 0.7}' in bench.log()


@pytest.mark.parametrize(
    ("body", "state", "reward", "cause"),
    [
        ('print(\'noise\'); print(\'{"reward": 0.5, "breakdown": {"a": 1}}\')', "done", 0.5, ""),
        ("print(0.25)", "done", 0.25, ""),
        ("print('0.5 of 1')", "error", None, "grader: the last line of its output is not JSON: '0.5 of 1'"),
        ("print(1); raise SystemExit(2)", "error", None, "grader: exit code 2"),
        ("print('NaN')", "error", None, "grader: returned nan, not a finite number"),
    ],
)
async def test_json_of_a_command(tmp_path, body, state, reward, cause):
    command = {"command": ["python", "check.py"], "result": "json"}
    async with bench_for(tmp_path, "", command, {"check.py": body}) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.cause) == (state, reward, cause)


def test_all_that_a_command_said_is_known_however_slowly_it_is_passed_on():
    """The last line of its output is its result. Our own output is read by a supervisor that may be busy."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(grade_child.__file__).parent)!r})
import grade_child
said = grade_child.run(["sh", "-c", "printf '%0100000d\\n0.5\\n' 1"], "/", {{}}, [], 60)
sys.stderr.write(repr((said[0], said[1][-5:])))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(2.5)
    out, said = process.communicate()
    assert said == b"(0, b'\\n0.5\\n')" and len(out) == 100_005


def test_a_process_that_a_command_leaves_does_not_hold_its_output_up():
    mark, began = f"x{secrets.token_hex(8)}", time.monotonic()
    code, said = grade_child.run(["sh", "-c", "setsid sleep 300 & echo 0.5"], "/", {**os.environ, "A": mark}, [], 60)
    reap_child.end(lambda environ: reap_child.has(environ, f"A={mark}".encode()))
    assert (code, said) == (0, b"0.5\n") and time.monotonic() - began < 60


async def test_a_command_that_does_not_end_is_the_agents_failure(tmp_path):
    command = {"command": ["sh", "-c", "sleep 60"], "timeout_s": 0.3}
    async with bench_for(tmp_path, "", command) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 0.0, ["grader_timeout"])


@pytest.mark.parametrize(
    ("calc", "reward", "shares"),
    [
        (SUM, 1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0}),
        ("def add(a, b): return 5", 0.0, {"fail_to_pass": 0.5, "pass_to_pass": 0.0}),
        ("def add(a, b): return 0", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        ("def add(a, b): return", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}),
        ("def add(", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}),
        ("import os; os._exit(0)", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}),
    ],
)
async def test_tests_must_pass_and_stay_passing(tmp_path, calc, reward, shares):
    settings = {
        "tests": ["tests"],
        "fail_to_pass": ["tests/test_calc.py::test_adds", "tests/test_calc.py::test_zero"],
        "pass_to_pass": ["tests/test_calc.py::test_old"],
    }
    files = {"tests/test_calc.py": TESTS}
    async with bench_for(tmp_path, writes(**{"calc.py": calc}), {"pytest": settings}, files) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.breakdown) == ("done", reward, shares)


async def test_a_tasks_own_tests_and_ids(tmp_path):
    hidden = {"tests": {"t/test_own.py": TESTS}, "fail_to_pass": ["t/test_own.py::test_adds"]}
    async with bench_for(tmp_path, writes(**{"calc.py": SUM}), {"pytest": {"fail_to_pass": ["x"]}}) as bench:
        outcome = await bench.run(hidden=hidden)
        assert (outcome.reward, outcome.breakdown) == (1.0, {"fail_to_pass": 1.0})
        outcome = await bench.run(hidden={**hidden, "fail_to_pass": ["t/test_own.py::test_missing"]})
        assert outcome.reward == 0.0
        outcome = await bench.run(hidden={"tests": {"../test_out.py": ""}})
        assert outcome.cause == "grader: hidden.tests: '../test_out.py' is no path inside the working directory"
        outcome = await bench.run(hidden={"tests": {"test_odd.py": "x = '\ud83d'"}})
        assert outcome.cause == r"grader: hidden.tests: 'test_odd.py': '\ud83d' is no character"


async def test_without_ids_all_tests_count_and_none_is_no_success(tmp_path):
    async with bench_for(tmp_path, writes(**{"src/calc.py": SUM}), {"pytest": {"pythonpath": ["src"]}}) as bench:
        assert (await bench.run(hidden={"tests": {"test_a.py": TESTS}})).breakdown == {"passed": 1.0}
        bad = {"test_a.py": TESTS, "test_b.py": "import nothing"}
        assert (await bench.run(hidden={"tests": bad})).reward == 0.0
        assert (await bench.run(hidden={"tests": {"test_c.py": ""}})).reward == 0.0


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ["python", "missing.py"]}, "there is no 'missing.py'"),
        ({"pytest": {"tests": ["missing"]}}, "reward.pytest.tests: there is no 'missing'"),
        ({"pytest": {"python": "/bin/false"}}, "/bin/false has no pytest"),
        ({"command": ["x"], "pytest": {}}, "give one of grade, command and pytest"),
        ({}, "no grader"),
        ({"pytest": {"tests": ["/etc"]}}, "must be a path inside"),
    ],
)
async def test_a_grader_that_cannot_work_is_refused_at_the_start(tmp_path, reward, text):
    with pytest.raises(RecipeError, match=text):
        bench = bench_for(tmp_path, "", reward)
        try:
            await bench.launcher.start()
        finally:
            await bench.launcher.stop()
            bench.store.close()


async def test_the_agent_is_not_given_a_command_that_grades(tmp_path):
    bench = bench_for(tmp_path, "", {"command": ["python", "check.py"]}, {"check.py": ""}, files=["check.py"])
    with pytest.raises(RecipeError, match=r"would show the agent 'check.py', which reward.command names"):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


def test_the_rules_of_repeated_gradings():
    grades = [Grade(1.0, {"a": 1.0}), Grade(0.0, {"a": 0.0, "b": 1.0}), Grade(1.0, {"a": 1.0})]
    results = {rule: combined(grades, rule) for rule in ("all", "any", "majority", "mean")}
    assert {rule: round(grade.reward, 2) for rule, grade in results.items()} == {
        "all": 0.0,
        "any": 1.0,
        "majority": 1.0,
        "mean": 0.67,
    }
    assert results["majority"].breakdown == {"a": 1.0, "b": 0.0} and results["all"].flags == ["flaky"]
    assert combined([Grade(1.0), Grade(0.0)], "majority").reward == 0.0, "half is no majority"


async def test_a_flaky_grader_is_asked_several_times_each_in_a_fresh_copy(tmp_path):
    grade = """
        from pathlib import Path
        COUNT = Path(__file__).with_name("count")
        def grade(task, rollout, workdir):
            number = len(COUNT.read_text()) if COUNT.exists() else 0
            COUNT.write_text("x" * (number + 1))
            assert sorted(file.name for file in workdir.iterdir()) == ["agent.py", "answer"]
            (workdir / "answer").unlink()
            return float(number != 1)
    """
    reward = {"grade": "grade.py:grade", "repeat": 3, "repeat_rule": "majority"}
    async with Bench(tmp_path, writes(answer="x"), grade=grade, reward=reward) as bench:
        outcome = await bench.run()
        assert (outcome.reward, outcome.flags) == (1.0, ["flaky"])


SIGNS = {
    "touched_tests": "import os; os.mkdir('tests'); open('tests/conftest.py', 'w').write('')",
    "outside_paths": "open('elsewhere.txt', 'w').write('x')",
    "symlinks": "import os; os.mkdir('src'); os.symlink('/etc/passwd', 'src/link')",
    "special_files": "import os; os.mkdir('src'); os.mkfifo('src/pipe')",
    "oversize": "import os; os.mkdir('src'); open('src/big', 'wb').truncate(3 << 20)",
    "printed_marker": "print('{\"reward\": 1.0}')",
    "stragglers": """
import os, subprocess, time
child = subprocess.Popen(["setsid", "sleep", "60"])
while os.getsid(child.pid) == os.getsid(0): time.sleep(0.01)
""",
}


@pytest.mark.parametrize("flag", SIGNS)
async def test_each_sign_is_flagged_and_the_recipe_says_what_it_costs(tmp_path, flag):
    reward = {
        "pytest": {"tests": ["tests"]},
        "paths": ["src", "calc.py"],
        "max_mb": 1,
    }
    outcomes = []
    for what in ("flag", "zero", "fail"):
        folder = tmp_path / what
        folder.mkdir()
        agent = writes(**{"calc.py": SUM}) + "\n" + SIGNS[flag]
        files = {"tests/test_calc.py": TESTS}
        async with bench_for(folder, agent, {**reward, "on_flag": {flag: what}}, files) as bench:
            outcome = await bench.run()
            assert outcome.flags == [flag]
            outcomes.append((outcome.state, outcome.reward, outcome.cause))
    assert outcomes == [("done", 1.0, ""), ("done", 0.0, ""), ("failed", 0.0, f"flagged: {flag}")]
