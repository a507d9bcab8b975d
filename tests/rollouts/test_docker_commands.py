"""Commands as graders where agents have containers: they run in a fresh one."""

import textwrap

import pytest
from bench import Bench

from aglite.errors import RecipeError

pytestmark = pytest.mark.docker


def bench_for(tmp_path, image, agent, made, section=None, **reward):
    section = {"image": image, **(section or {})}
    bench = Bench(tmp_path, agent, reward={"grade": None, "timeout_s": 120, **reward}, **section)
    for name, text in made.items():
        file = bench.recipe.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip())
        file.chmod(0o755)
    return bench


LOOKS = """
    #!/usr/bin/env python3
    import json, os, pathlib, socket
    import neighbour
    task = json.load(open(os.environ["AGLITE_TASK_FILE"]))
    rollout = json.load(open(os.environ["AGLITE_ROLLOUT_FILE"]))
    work = pathlib.Path(os.environ["AGLITE_WORKDIR"])
    assert task["hidden"] == {"answer": "42"} and rollout["exit_code"] == 0 and rollout["flags"] == [], (task, rollout)
    assert sorted({*os.listdir()} - {"__pycache__"}) == ["data", "look.py", "neighbour.py"], os.listdir()
    assert os.listdir("data") == ["expected"] and work == pathlib.Path("/rollout/work")
    assert os.readlink(work / "link") == "answer" and not os.path.exists("/tmp/left")
    assert not {"OPENAI_API_KEY", "OPENAI_BASE_URL", "SECRET_OF_THE_USER"} & set(os.environ)
    assert os.getuid() == 1000 and os.listdir("/sys/class/net") == ["lo"]
    right = (work / "answer").read_text() == open("data/expected").read()
    print("noise")
    print(json.dumps({"reward": right * neighbour.WORTH, "breakdown": {"right": right}}))
"""


@pytest.mark.parametrize(("answer", "reward"), [("42", 0.5), ("41", 0.0)])
async def test_a_command_sees_what_it_needs_and_no_more(tmp_path, image, containers, monkeypatch, answer, reward):
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    agent = f"""
        import os
        open("answer", "w").write("{answer}"); os.symlink("answer", "link"); open("/tmp/left", "w").write("x")
        open("neighbour.py", "w").write("WORTH = 1"); open("json.py", "w").write("raise SystemExit(0)")
    """
    made = {"look.py": LOOKS, "neighbour.py": "WORTH = 0.5", "data/expected": "42", "tasks.jsonl": "secret"}
    settings = {"command": ["./look.py"], "files": ["neighbour.py", "data"], "result": "json"}
    async with bench_for(tmp_path, image, agent, made, **settings) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", reward), (outcome, bench.log())
        assert outcome.breakdown == {"right": float(answer == "42")} and outcome.flags == []
        assert "--- grader ---\nnoise\n" in bench.log()


@pytest.mark.parametrize(
    ("script", "state", "reward", "cause", "flags"),
    [
        ("exit 0", "done", 1.0, "", []),
        ("exit 3", "done", 0.0, "", []),
        ("kill -9 $$", "done", 0.0, "", []),
        ("exec sleep 100", "done", 0.0, "", ["grader_timeout"]),
        (
            "exec python3 -c 'x = [bytearray(b\"x\" * (1 << 20)) for _ in range(1000)]'",
            "done",
            0.0,
            "",
            ["grader_memory"],
        ),
    ],
)
async def test_how_a_command_ends(tmp_path, image, containers, script, state, reward, cause, flags):
    settings = {
        "command": ["./grade.sh"],
        "timeout_s": 3 if flags == ["grader_timeout"] else 90,
        "section": {"limits": {"memory_mb": 100}},
    }
    async with bench_for(tmp_path, image, "", {"grade.sh": f"#!/bin/sh\n{script}\n"}, **settings) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.cause, outcome.flags) == (state, reward, cause, flags)


async def test_what_is_no_result_is_an_error(tmp_path, image, containers):
    settings = {"command": ["sh", "-c", "echo 0.5; echo 0.7 >&2; exit 2"], "result": "json"}
    async with bench_for(tmp_path, image, "", {}, **settings) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.cause) == ("error", "grader: exit code 2")
        bench.launcher._judging._grader._plan._reward.command[2] = "echo 0.5; echo 0.7 >&2"
        assert (await bench.run()).reward == 0.5, "its standard error is no result"


async def test_only_a_recipe_that_says_so_runs_it_on_this_machine(tmp_path, image, containers):
    made = {"grade.sh": "#!/bin/sh\ntest -e tasks.jsonl && test ! -e /rollout\n", "tasks.jsonl": ""}
    async with bench_for(tmp_path, image, "", made, command=["./grade.sh"], sandbox=False) as bench:
        assert (await bench.run()).reward == 1.0
    (tmp_path / "sealed").mkdir()
    async with bench_for(tmp_path / "sealed", image, "", made, command=["./grade.sh"]) as bench:
        assert (await bench.run()).reward == 0.0


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ({"command": ["no-such"]}, "reward.command: .* has no program 'no-such'"),
        ({"command": ["./no-such"]}, "reward.command: there is no program './no-such'"),
        ({"command": ["python3", "x.py"]}, "reward.command: there is no 'x.py'"),
        ({"command": ["true"], "files": ["x"]}, "reward.files: there is no 'x'"),
        ({"command": ["true"], "judge": {"url": "http://x", "model": "m"}}, "reward.judge: a command in a sealed"),
        ({"pytest": {"python": "/no/python"}}, "reward.pytest: .* has no program '/no/python'"),
        ({"grade": "grade.py:grade", "sandbox": False}, "sandbox: only for `command`"),
        ({"grade": "grade.py:grade", "files": ["x"]}, "files: only for `command`"),
    ],
)
async def test_a_command_that_cannot_work_is_refused_at_the_start(tmp_path, image, containers, reward, text):
    with pytest.raises(RecipeError, match=text):
        bench = bench_for(tmp_path, image, "", {}, **reward)
        try:
            await bench.launcher.start()
        finally:
            await bench.launcher.stop()
            bench.store.close()


async def test_the_agent_is_not_given_what_the_command_needs(tmp_path, image, containers):
    settings = {"command": ["true"], "files": ["expected"], "section": {"files": ["expected"]}}
    bench = bench_for(tmp_path, image, "", {"expected": "42"}, **settings)
    with pytest.raises(RecipeError, match=r"would show the agent 'expected', which reward.files names"):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


TRAPS = """
    import os
    def writes(name, text):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        open(name, "w").write(text)
        os.chmod(name, 0o755)
    for name in ("grade.sh", "grep", "cat", "test", "python3", "sh"):
        writes(name, "#!/bin/sh\\nexit 0\\n")
    for name in ("sitecustomize", "usercustomize", "json", "os", "helper", "conftest"):
        writes(f"{name}.py", "import os; os._exit(0)\\n")
    writes("a.pth", "import os; os._exit(0)\\n"); writes("pyvenv.cfg", "home = /tmp\\n"); writes(".env", "PATH=.\\n")
    home = os.path.expanduser("~")
    for name in (".profile", ".bashrc", ".config/git/config"):
        writes(f"{home}/{name}", "exit 0\\n")
    writes(f"{home}/.local/lib/python3.13/site-packages/a.pth", "import os; os._exit(0)\\n")
    os.symlink("../grader/expected", "answer")
    for name in ("expected", "helper.py"): writes(f"/rollout/grader/{name}", "41")
"""


async def test_traps_on_the_way_of_a_command(tmp_path, image, containers):
    """It looks for the answer by the shell and by Python, in its own folder and in the agent's; each would be fooled by
    something of the agent's if it were found first."""
    script = """
        #!/bin/sh
        cd "$AGLITE_WORKDIR" || exit 3
        python3 -c 'import os, sys; sys.path.remove(""); import json; sys.exit(0)' || exit 4
        cd "$OLDPWD" && python3 check.py || exit 5
        test "$(cat "$AGLITE_WORKDIR/answer")" = "$(cat expected)"
    """
    made = {"grade.sh": script, "check.py": "import helper, json; assert helper.MINE", "helper.py": "MINE = 1"}
    settings = {"command": ["./grade.sh"], "files": ["check.py", "helper.py", "expected"]}
    async with bench_for(tmp_path, image, TRAPS, {**made, "expected": "42"}, **settings) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward, outcome.flags) == ("done", 0.0, ["symlinks"]), bench.log()


async def test_what_a_command_starts_of_the_agents_ends_with_it(tmp_path, image, containers):
    """The agent's program leaves a process that goes on printing rewards and writing them into what it finds open."""
    program = """
        import os, sys, time
        if os.fork(): sys.exit(0)
        os.setsid()
        while True:
            for fd in (1, 2): os.write(fd, b'{"reward": 1.0}\\n')
            time.sleep(0.01)
    """
    agent = f"open('program.py', 'w').write({textwrap.dedent(program)!r})"
    script = '#!/bin/sh\npython3 "$AGLITE_WORKDIR/program.py" >/dev/null 2>&1\nsleep 0.2\necho 0.25\n'
    settings = {"command": ["./grade.sh"], "result": "json"}
    async with bench_for(tmp_path, image, agent, {"grade.sh": script}, **settings) as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", 0.25), bench.log()
        assert containers("agent") == []
