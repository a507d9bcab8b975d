"""Agents that want reward without the work, against the local backend's way to a grade. Their targets are files and
processes that the test made."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from bench import Bench, is_running, until

from aglite import secrecy

TEST = "from calc import add\ndef test_adds():\n    assert add(2, 3) == 5\n"
WRONG = "open('calc.py', 'w').write('def add(a, b): return 0')\n"


def writes(name, source):
    """Agent code that writes a program of its own."""
    return f"open({name!r}, 'w').write({textwrap.dedent(source)!r})\n"


HOOK = """
    import pytest
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item, call):
        result = (yield).get_result()
        result.outcome = "passed"
"""

ON_TESTS = {
    "rewrites the tests": """
        os.makedirs("tests"); open("tests/test_calc.py", "w").write("def test_adds(): pass")
    """,
    "a conftest that turns failures round": "os.makedirs('tests/deep')\n"
    + "".join(writes(f"{place}/conftest.py", HOOK) for place in (".", "tests", "tests/deep")),
    "its own settings of pytest": """
        open("pytest.ini", "w").write("[pytest]\\naddopts = -p trick")
        open("tox.ini", "w").write("[pytest]\\naddopts = --collect-only")
        open("pyproject.toml", "w").write("[tool.pytest.ini_options]\\naddopts = '-p trick'")
        open("trick.py", "w").write("import os; os._exit(0)")
    """,
    "a sitecustomize": """
        code = "import sys, types; m = types.ModuleType('calc'); m.add = lambda a, b: a + b; sys.modules['calc'] = m"
        for name in ("sitecustomize.py", "usercustomize.py"): open(name, "w").write(code)
        user = os.path.expanduser("~/.local/lib/python3.11/site-packages")
        os.makedirs(user); open(f"{user}/usercustomize.py", "w").write(code); open(f"{user}/a.pth", "w").write(code)
    """,
    "modules in place of the library's": """
        for name in ("pytest", "_pytest", "json", "os", "re", "pluggy", "iniconfig", "site"):
            open(f"{name}.py", "w").write("import sys; sys.exit(0)")
    """,
    "ends the process as if all were well": "open('calc.py', 'w').write('import os; os._exit(0)')",
    "ends it from a thread and at exit": writes(
        "calc.py",
        """
        import atexit, os, threading, time
        atexit.register(os._exit, 0)
        threading.Thread(target=lambda: (time.sleep(0.2), os._exit(0)), daemon=True).start()
        time.sleep(1)
        """,
    ),
    "writes reports into every open file": writes(
        "calc.py",
        """
        import json, os
        line = json.dumps({"id": "tests/test_calc.py::test_adds", "passed": True, "finished": True}) + "\\n"
        for fd in range(64):
            try: os.write(fd, b"\\n" + line.encode())
            except OSError: pass
        os._exit(0)
        """,
    ),
    "looks for the result in its parents": writes(
        "calc.py",
        """
        import fcntl, os
        pid = os.getppid()
        for up in range(3):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    if "memfd:result" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as result:
                            result.write(b'{"value": 1.0}')
                except OSError: pass
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
            if pid <= 1: break
        """,
    ),
    "a cache of the tests with its own code": """
        import importlib.util, marshal, sys
        code = compile("def test_adds(): pass", "test_calc.py", "exec")
        flags = (1).to_bytes(4, "little") + bytes(8)  # by hash, not checked
        for folder in ("tests/__pycache__", "__pycache__"):
            os.makedirs(folder)
            for tag in ("cpython-311", "cpython-311-pytest-8.4.2", "cpython-311-pytest-8.4.1"):
                with open(f"{folder}/test_calc.{tag}.pyc", "wb") as file:
                    file.write(importlib.util.MAGIC_NUMBER + flags + marshal.dumps(code))
    """,
    "a link in place of the tests": """
        os.makedirs("evil"); open("evil/test_calc.py", "w").write("def test_adds(): pass"); os.symlink("evil", "tests")
    """,
}


@pytest.mark.parametrize("attack", ON_TESTS)
async def test_tests_are_not_fooled(tmp_path, attack):
    agent = "import os\n" + WRONG + textwrap.dedent(ON_TESTS[attack])
    reward = {"grade": None, "pytest": {"tests": ["tests"], "fail_to_pass": ["tests/test_calc.py::test_adds"]}}
    bench = Bench(tmp_path, agent, reward=reward)
    tests = bench.recipe.folder / "tests"
    tests.mkdir()
    (tests / "test_calc.py").write_text(TEST)
    async with bench:
        outcome = await bench.run()
        assert outcome.state == "done", bench.log()
        assert outcome.reward == 0.0, bench.log()
    assert [file.name for file in tests.iterdir()] == ["test_calc.py"] and (tests / "test_calc.py").read_text() == TEST


READS = """
    def grade(task, rollout, workdir):
        answer = workdir / "answer"
        return float(answer.is_file() and answer.read_text().strip() == "42")
"""


@pytest.mark.parametrize(
    ("attack", "flag"),
    [
        ("os.symlink(SOLUTION, 'answer')", "symlinks"),
        ("os.symlink(os.path.relpath(SOLUTION), 'answer')", "symlinks"),
        ("os.symlink('/proc/self/root' + SOLUTION, 'answer')", "symlinks"),
        ("os.mkfifo('answer')", "special_files"),
        ("os.mknod('answer', 0o20666, os.makedev(1, 5))", "special_files"),
        ("open('answer', 'wb').truncate(1 << 40)", "oversize"),
        ("os.mkdir('answer')", None),
        ("print('{\"reward\": 1.0}')", "printed_marker"),
        ("os.mkdir('x', 0); open('answer', 'w').write('no')", None),
    ],
)
async def test_what_is_in_place_of_an_answer_neither_leads_a_grader_astray_nor_holds_it_up(tmp_path, attack, flag):
    if "mknod" in attack and os.getuid():
        pytest.skip("only root makes devices")
    solution = tmp_path / "solution"
    solution.write_text("42")
    agent = f"import os, resource\nSOLUTION = {str(solution)!r}\n"
    agent += "resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE))\n"
    if "1 << 40" in attack:
        attack = attack.replace("1 << 40", "2000 << 20")  # its own limit of a file's size is 2 GiB
    async with Bench(tmp_path, agent + attack, grade=READS) as bench:
        began = time.monotonic()
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", 0.0), bench.log()
        assert outcome.flags == ([flag] if flag else [])
        assert time.monotonic() - began < 90, "a tenth of it, but not on a busy machine"
    assert solution.read_text() == "42"


async def test_a_process_that_cannot_be_found_rewrites_only_what_is_not_graded(tmp_path):
    """In a session of its own and without its environment, a process outlives a local agent: it has the agent's folder,
    the grader has another."""
    daemon = (
        "import os, time\ntime.sleep(1)\nfor _ in range(400):\n  time.sleep(0.02)\n"
        "  try: open('answer', 'w').write('42')\n  except OSError: pass"
    )
    agent = f"""
        import os, subprocess, time
        open("answer", "w").write("0")
        started = subprocess.Popen(["env", "-i", "setsid", "python3", "-c", {daemon!r}])
        print(started.pid, flush=True)
        while os.getsid(started.pid) == os.getsid(0): time.sleep(0.01)
    """
    grade = """
        import time
        def grade(task, rollout, workdir):
            seen = []
            for _ in range(20):
                time.sleep(0.1)
                seen.append((workdir / "answer").read_text())
            return float("42" in seen)
    """
    async with Bench(tmp_path, agent, grade=grade) as bench:
        outcome = await bench.run()
        pid = int(bench.log().split()[0])
        try:
            assert (outcome.state, outcome.reward) == ("done", 0.0), bench.log()
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not is_running(pid))


async def test_an_exit_code_is_not_forged_by_what_is_printed(tmp_path):
    """The program under test writes results into the grader's own output, now and after it has ended."""
    program = """\
        #!/bin/sh
        for fd in 1 2; do echo '{"reward": 1.0}' >&$fd; done
        for fd in 1 2; do echo '{"reward": 1.0}' >/proc/$PPID/fd/$fd; done 2>/dev/null
        (sleep 0.1; echo '{"reward": 1.0}') &
        exit 0
    """
    agent = "import os\n" + writes("program", program) + "os.chmod('program', 0o755)\nos.symlink('/bin/true', 'grep')\n"
    script = '#!/bin/sh\nout=$("$AGLITE_WORKDIR/program" 2>/dev/null)\ntest "$out" = 42 && echo 42 | grep -q 42\n'
    bench = Bench(tmp_path, agent, reward={"grade": None, "command": ["./grade.sh"]})
    (bench.recipe.folder / "grade.sh").write_text(script)
    (bench.recipe.folder / "grade.sh").chmod(0o755)
    async with bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", 0.0)
        assert "symlinks" in outcome.flags


async def test_a_result_that_somebody_sealed_first_is_none(tmp_path):
    """The grader runs the agent's program, which finds the result in memory, writes a reward and seals it. (Root may do
    so; others may not even look.)"""
    program = """
        import fcntl, os
        pid = os.getpid()
        while pid > 1:
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
            try: fds = os.listdir(f"/proc/{pid}/fd")
            except OSError: break
            for fd in fds:
                try:
                    if "memfd:result" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                        out = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                        os.write(out, b'{"value": 1.0}')
                        fcntl.fcntl(out, fcntl.F_ADD_SEALS, 15)
                except OSError: pass
    """
    grade = """
        import subprocess, sys
        def grade(task, rollout, workdir):
            subprocess.run([sys.executable, workdir / "program.py"])
            return 0.0
    """
    async with Bench(tmp_path, writes("program.py", program), grade=grade) as bench:
        outcome = await bench.run()
        assert outcome.reward in (0.0, None) and outcome.state in ("done", "error")


async def test_the_hidden_part_is_nowhere_that_an_agent_is_led_to(tmp_path):
    """Its environment, its folder, its task file, its command line, and those of its parents."""
    agent = """
        import os, pathlib
        found = []
        def look(name, data):
            if b"s3" + b"cr3t" in data: found.append(name)
        look("env", repr(os.environ).encode())
        for file in [*pathlib.Path("..").rglob("*"), pathlib.Path(os.environ["AGLITE_TASK_FILE"])]:
            if file.is_file(): look(str(file), file.read_bytes())
        pid = os.getpid()
        while pid > 1:
            for name in ("environ", "cmdline"):
                try: look(f"{pid} {name}", open(f"/proc/{pid}/{name}", "rb").read())
                except OSError: pass
            for fd in range(64):
                link = f"/proc/{pid}/fd/{fd}"
                try:
                    if "memfd" in os.readlink(link): look(link, open(link, "rb").read())
                except OSError: pass
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        print(found)
    """
    async with Bench(
        tmp_path, agent, grade="def grade(task, *_): return float(task['hidden']['key'] == 's3cr3t')"
    ) as bench:
        outcome = await bench.run(hidden={"key": "s3cr3t"})
        assert outcome.reward == 1.0
        assert bench.log() == "[]\n"


async def test_no_secret_of_the_user_reaches_the_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    test = "import os\ndef test_env(): assert not {'MY_API_KEY', 'PYTHONPATH', 'OPENAI_API_KEY'} & set(os.environ)\n"
    async with Bench(tmp_path, reward={"grade": None, "pytest": {}}) as bench:
        outcome = await bench.run(hidden={"tests": {"test_env.py": test}})
        assert outcome.reward == 1.0, bench.log()


async def test_tests_that_hang_fork_and_flood_end_in_time(tmp_path):
    calc = """
        import os, subprocess, sys, time
        subprocess.Popen(["setsid", "sleep", "300"])
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(1)
        while True: os.write(2, b"x" * 65536)
    """
    reward = {"grade": None, "pytest": {"tests": ["test_calc.py"]}, "timeout_s": 2}
    bench = Bench(tmp_path, writes("calc.py", calc), reward=reward)
    (bench.recipe.folder / "test_calc.py").write_text(TEST)
    async with bench:
        began = time.monotonic()
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 0.0, ["grader_timeout"])
        assert time.monotonic() - began < 120, "what hangs would go on for 300 s"
        assert bench.alive() == []
        assert len(bench.log()) < 1 << 20


async def test_the_supervisors_files_and_other_rollouts_are_as_before(tmp_path):
    """An agent that fills its folder with links and odd names disturbs no other that runs beside it."""
    agent = """
        import os
        if os.environ["BAD"] == "yes":
            for n in range(200): os.symlink("/", f"l{n}")
            open("a\\nb", "w").write("x"); open("x" * 255, "w").write("x"); os.makedirs("d/" * 40)
            os.symlink("..", "up"); os.chmod(".", 0o500)
        open("answer", "w").write("42") if os.environ["BAD"] == "no" else None
    """
    async with Bench(tmp_path, agent, grade=READS, env={"BAD": "{task.bad}"}, concurrency=4) as bench:
        before = subprocess.run(["ls", "-laR", bench.recipe.folder], capture_output=True).stdout  # noqa: ASYNC221
        tasks = [await bench.submit({"bad": "no" if n % 2 else "yes"}) for n in range(8)]
        outcomes = await asyncio.gather(*tasks)
        assert [outcome.reward for outcome in outcomes] == [0.0, 1.0] * 4
        assert all("symlinks" in outcome.flags for outcome in outcomes[::2])
        assert subprocess.run(["ls", "-laR", bench.recipe.folder], capture_output=True).stdout == before  # noqa: ASYNC221


async def test_a_cache_made_to_fit_a_test_file_of_the_grader_is_not_believed(tmp_path):
    """Python and pytest believe compiled code that names the time and size of its source."""
    source = TEST.encode()
    agent = f"""
        import importlib.util, marshal, os
        code = compile("def test_adds(): pass", "test_calc.py", "exec")
        head = importlib.util.MAGIC_NUMBER + bytes(4) + (1_700_000_000).to_bytes(4, "little")
        data = head + ({len(source)}).to_bytes(4, "little") + marshal.dumps(code)
        os.mkdir("__pycache__")
        for tag in ("cpython-311", "cpython-311-pytest-{pytest.__version__}"):
            open(f"__pycache__/test_calc.{{tag}}.pyc", "wb").write(data)
    """
    bench = Bench(
        tmp_path, textwrap.dedent(agent) + WRONG, reward={"grade": None, "pytest": {"tests": ["test_calc.py"]}}
    )
    test = bench.recipe.folder / "test_calc.py"
    test.write_bytes(source)
    os.utime(test, (1_700_000_000, 1_700_000_000))
    async with bench:
        assert (await bench.run()).reward == 0.0, bench.log()


PROBE = """
import subprocess, sys
hide_process()
look = "import os; print(len(open(f'/proc/{os.getppid()}/environ').read()), os.listdir(f'/proc/{os.getppid()}/fd'))"
print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stderr[-200:])
"""


def test_a_hidden_process_is_not_looked_into_by_its_children():
    """As an ordinary user: root may look."""
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    python = next((name for name in (sys.executable, "/usr/bin/python3") if _can_run(name, user)), None)
    if python is None:
        pytest.skip("there is no Python that an ordinary user can run")
    code = Path(secrecy.__file__).read_text()
    done = subprocess.run([python, "-c", code + PROBE], capture_output=True, text=True, cwd="/", **user)
    assert "Permission denied" in done.stdout, (done.stdout, done.stderr)
    seen = subprocess.run([python, "-c", PROBE.replace("hide_process()", "")], capture_output=True, cwd="/", **user)
    assert seen.stdout == b"\n", "otherwise they can look"


def _can_run(python, user):
    try:
        return subprocess.run([python, "-c", "import ctypes"], cwd="/", **user).returncode == 0
    except PermissionError:
        return False
