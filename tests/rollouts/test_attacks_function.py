"""What an agent leaves is data to a function that grades on this machine: nothing of it is run or imported."""

import os
import shutil
import subprocess

import pytest
from bench import Bench

LEAVES = """
    import json, os
    trap = json.load(open(os.environ["AGLITE_TASK_FILE"]))["trap"]
    shell = f"touch {trap}; exit 1"
    code = f"open({trap!r}, 'w').close()\\nforged = 1\\n"
    def writes(name, text, mode=0o755):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        open(name, "w").write(text)
        os.chmod(name, mode)
"""

KINDS = {
    "modules and start files of Python": """
    for name in ("random", "helper", "colorsys", "json", "sitecustomize", "usercustomize", "conftest", "grade"):
        writes(f"{name}.py", code)
        writes(f"{name}/__init__.py", code) if name != "grade" else None
        writes(f"__pycache__/{name}.cpython-311.pyc", code)
    writes("a.pth", f"import os; open({trap!r}, 'w')\\n")
    writes("pyvenv.cfg", "home = /nowhere\\n")
    writes(os.path.expanduser("~/.local/lib/python3.11/site-packages/a.pth"), f"import os; open({trap!r}, 'w')\\n")
    writes(os.path.expanduser("~/.local/lib/python3.11/site-packages/usercustomize.py"), code)
    """,
    "a repository of git": """
    writes(".git/HEAD", "ref: refs/heads/main\\n", 0o644)
    os.makedirs(".git/objects"); os.makedirs(".git/refs")
    writes(".git/config", f'[core]\\n repositoryformatversion = 0\\n fsmonitor = "{shell}"\\n', 0o644)
    writes("inner/.git", "gitdir: ../repo\\n", 0o644)
    """,
    "a bare repository of git": """
    writes("HEAD", "ref: refs/heads/main\\n", 0o644)
    os.makedirs("objects"); os.makedirs("refs")
    writes("config", f'[core]\\n repositoryformatversion = 0\\n worktree = .\\n fsmonitor = "{shell}"\\n', 0o644)
    """,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_is_not_run(tmp_path, place, kind):
    if "git" in kind and not shutil.which("git"):
        pytest.skip("there is no git")
    grade = """
        import os, random, site, subprocess, sys, colorsys
        import helper
        def grade(task, rollout, workdir):
            assert workdir not in map(os.path.abspath, sys.path) and os.getcwd() == os.path.dirname(__file__)
            assert not any(str(workdir) in value for name, value in os.environ.items() if name != "TMPDIR")
            for module in (random, helper, colorsys):
                assert not hasattr(module, "forged"), module
            for command in (["git", "-C", workdir, "status"], [sys.executable, "-c", "import json, random"]):
                if command[0] != "git" or task["public"]["git"]:
                    subprocess.run(command)
            return float(os.path.exists(workdir / "left"))
    """
    trap = tmp_path / "trap"
    agent = LEAVES + KINDS[kind] + "\n    writes('left', '')\n"
    bench = Bench(tmp_path, agent, grade=grade, **place)
    (bench.recipe.folder / "helper.py").write_text("")
    async with bench:
        outcome = await bench.run({"trap": str(trap), "git": "git" in kind})
        assert (outcome.state, outcome.reward) == ("done", 1.0), (outcome, bench.log())
    assert not trap.exists()


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "git" in kind])
def test_git_would_have_run_it(tmp_path, kind):
    """What the test above leaves is a trap where nothing is done against it."""
    trap = tmp_path / "trap"
    (tmp_path / "task.json").write_text(f'{{"trap": "{trap}"}}')
    (tmp_path / "work").mkdir()
    source = "\n".join(line[4:] for line in (LEAVES + KINDS[kind]).splitlines())
    env = {**os.environ, "AGLITE_TASK_FILE": str(tmp_path / "task.json"), "HOME": str(tmp_path)}
    subprocess.run(["python3", "-c", source], cwd=tmp_path / "work", env=env, check=True)
    subprocess.run(["git", "status"], cwd=tmp_path / "work", env=env, capture_output=True)
    assert trap.exists()
