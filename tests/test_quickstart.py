"""quickstart.sh: each failure ends in one clear sentence. Pythons, pip and df are stand-ins found through PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TOOLS = ["awk", "bash", "cat", "chmod", "cksum", "cp", "df", "dirname", "grep", "mkdir", "rm", "sed", "tail", "tee"]

# What `python -m venv` of the stand-in makes: a python whose pip does what $PIP_SAYS says, and an `aglite` that echoes.
FAKE_PYTHON = """#!/bin/bash
version="${FAKE_VERSION:-3.11}"
case "$*" in
-VV) echo "Python $version.9 (fake)" ;;
*version_info*) echo "$version" ;;
*"-m venv"*)
    [ -z "${VENV_SAYS:-}" ] || { echo "$VENV_SAYS"; exit 1; }
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
    printf '#!/bin/bash\\necho "aglite $*"\\n' >.venv/bin/aglite && chmod +x .venv/bin/aglite ;;
*"-m pip --version"*) ;;
*"-m pip install"*)
    echo "pip $*" >>pip.calls
    [ -z "${PIP_SAYS:-}" ] || { echo "$PIP_SAYS"; exit 1; }
    echo "  Downloading torch-2.13.0.whl (190 MB)" ;;
*"-m pytest"*)
    echo "pytest ran: $*"
    [[ "$*" == *--last-failed* ]] && exit "${AGAIN_CODE:-0}"
    if [ -n "${FAILED:-}" ]; then
        mkdir -p .pytest_cache/v/cache
        echo "{" >.pytest_cache/v/cache/lastfailed
        for id in $FAILED; do echo "  \\"$id\\": true," >>.pytest_cache/v/cache/lastfailed; done
        echo "}" >>.pytest_cache/v/cache/lastfailed
    fi
    exit "${TESTS_CODE:-0}" ;;
"-c ") ;;
*) exit 1 ;;
esac
"""


DRIVER = "/proc/driver/nvidia"


@pytest.fixture
def clone(tmp_path):
    """A folder with the script, and `run(*arguments, **environment)`; PATH holds only what the script may use."""
    clone, tools = tmp_path / "clone", tmp_path / "bin"
    clone.mkdir()
    tools.mkdir()
    shutil.copy(ROOT / "pyproject.toml", clone)
    script = (ROOT / "quickstart.sh").read_text()
    assert DRIVER in script
    (clone / "quickstart.sh").write_text(script.replace(DRIVER, str(tmp_path / "driver")))  # whatever this machine has
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "python3.11").write_text(FAKE_PYTHON)
    (tools / "python3.11").chmod(0o755)

    class Clone:
        path = clone
        bin = tools
        driver = tmp_path / "driver"

        def installed(self):
            """What pip was asked to install: (torch, everything else) of the last time."""
            return [line.split(" install ")[1] for line in (clone / "pip.calls").read_text().splitlines()][-2:]

        def nvidia_smi(self, script):
            (tools / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
            (tools / "nvidia-smi").chmod(0o755)

        def run(self, *arguments, **environment):
            return subprocess.run(
                [shutil.which("bash"), "quickstart.sh", *arguments],
                cwd=clone,
                env={
                    "PATH": str(tools),
                    "AGLITE_TORCH_INDEX": "",
                    "AGLITE_NEEDED_MB": "1",
                    "HOME": str(tmp_path),
                    **environment,
                },
                capture_output=True,
                text=True,
                timeout=240,
            )

        def fails(self, *arguments, **environment):
            done = self.run(*arguments, **environment)
            assert done.returncode == 1
            sentences = [line for line in done.stderr.splitlines() if line.startswith("quickstart: ")]
            assert len(sentences) == 1, done.stderr
            return done.stderr

    return Clone()


def test_the_whole_way(clone):
    done = clone.run("--steps", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "aglite up recipes/instruct --headless --steps 3"  # stdout is no terminal here
    assert "aglite model fetch smollm2-135m" in lines
    assert any(line.startswith("time: python ") and "torch" in line and "s in all" in line for line in lines)
    assert "  downloading torch-2.13.0.whl (190 MB)" in lines
    torch, packages = (clone.path / "pip.calls").read_text().splitlines()
    assert torch.endswith("torch==2.13.0") and packages.endswith("torch==2.13.0 -e .[cpu]")


def test_a_second_time_installs_nothing(clone):
    clone.run("install")
    calls = (clone.path / "pip.calls").read_text()
    done = clone.run("install")
    assert ".venv is up to date" in done.stdout and (clone.path / "pip.calls").read_text() == calls


def test_tests_install_what_they_need_and_pass_options_on(clone):
    done = clone.run("test", "-x", "tests/test_config.py")
    assert "pytest ran: -m pytest -x tests/test_config.py" in done.stdout
    assert "-e .[cpu,test]" in (clone.path / "pip.calls").read_text()
    assert ".venv is up to date" in clone.run("install").stdout


FEW = "tests/test_a.py::test_b tests/test_a.py::test_c[x-1]"
MANY = " ".join(f"tests/test_a.py::test_{n}" for n in range(6))


@pytest.mark.parametrize(
    ("tests", "code", "tries"),
    [
        ({}, 0, 1),
        ({"TESTS_CODE": "1", "FAILED": FEW}, 0, 2),
        ({"TESTS_CODE": "1", "FAILED": FEW, "AGAIN_CODE": "1"}, 1, 2),
        ({"TESTS_CODE": "1", "FAILED": FEW, "AGAIN_CODE": "5"}, 1, 2),  # pytest ran none
        ({"TESTS_CODE": "1", "FAILED": MANY}, 1, 1),
        ({"TESTS_CODE": "1"}, 1, 1),
        ({"TESTS_CODE": "2", "FAILED": FEW}, 2, 1),  # interrupted
        ({"TESTS_CODE": "4"}, 4, 1),  # not even begun
    ],
)
def test_a_few_failures_of_all_tests_have_one_more_try(clone, tests, code, tries):
    done = clone.run("test", AGLITE_HARNESSES="/opt/agents", **tests)
    assert (done.returncode, done.stdout.count("pytest ran: ")) == (code, tries), done.stdout + done.stderr
    named = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("UNSTEADY")]
    assert named == (FEW.split() if (code, tries) == (0, 2) else [])


def test_chosen_tests_have_no_more_tries(clone):
    done = clone.run("test", "tests/test_a.py", TESTS_CODE="1", FAILED=FEW)
    assert (done.returncode, done.stdout.count("pytest ran: ")) == (1, 1)


@pytest.mark.parametrize("rc", [0, 1])
def test_agent_programs_are_installed_for_the_tests_that_drive_them(clone, rc):
    script = clone.path / "tests" / "harnesses" / "install.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        f'echo "programs in $1"; [ {rc} = 0 ] || echo "left out: codex (npm is not here)" >&2; exit {rc}\n'
    )
    done = clone.run("test")
    assert (
        f"programs in {clone.path.parent}/.cache/aglite/harnesses" in done.stdout
        and "pytest ran: -m pytest" in done.stdout
    )
    assert ("the tests of what was left out are skipped" in done.stdout) == bool(rc)
    assert "programs in" in clone.run("test", "tests/harnesses").stdout
    assert "programs in" not in clone.run("test", "tests/test_config.py").stdout
    assert "programs in" not in clone.run("test", AGLITE_HARNESSES="/opt/agents").stdout


A_GPU = 'echo "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5e4f)"'


def test_where_there_is_a_gpu_its_packages_are_installed(clone):
    clone.nvidia_smi(A_GPU)
    done = clone.run("install", AGLITE_TORCH_INDEX="http://127.0.0.1:9/cpu")
    assert "there is an NVIDIA GPU: installing for it (AGLITE_EXTRAS=cpu does without)" in done.stdout
    torch, packages = clone.installed()
    assert torch.endswith("torch==2.11.0") and packages.endswith("torch==2.11.0 -e .[gpu]")
    assert "127.0.0.1:9" not in torch, "that index has torch for the CPU"
    assert ".venv is up to date" in clone.run("install").stdout


def test_a_gpu_without_its_tool_is_seen_by_the_kernel(clone):
    (clone.driver / "gpus").mkdir(parents=True)
    clone.run("install")
    assert clone.installed()[1].endswith("[cpu]"), "a driver without a GPU"
    (clone.driver / "gpus" / "0000:65:00.0").mkdir()
    clone.run("install")
    assert clone.installed()[1].endswith("[gpu]")


@pytest.mark.parametrize("script", ["exit 9", 'echo "No devices were found"', "exit 0"])
def test_a_tool_without_a_gpu_is_none(clone, script):
    clone.nvidia_smi(script)
    assert clone.run("install").returncode == 0
    assert clone.installed()[1].endswith("[cpu]")


def test_what_is_installed_can_be_said(clone):
    clone.nvidia_smi(A_GPU)
    done = clone.run("install", AGLITE_EXTRAS="cpu")
    assert clone.installed()[1].endswith("-e .[cpu]") and "there is an NVIDIA GPU" not in done.stdout
    clone.run("test", AGLITE_EXTRAS="gpu", AGLITE_HARNESSES="/opt/agents")
    assert clone.installed()[1].endswith("torch==2.11.0 -e .[gpu,test]"), "one set replaces the other"
    assert ".venv is up to date" in clone.run("install", AGLITE_EXTRAS="gpu").stdout
    assert "AGLITE_EXTRAS is 'cuda'; it can be cpu or gpu." in clone.fails("install", AGLITE_EXTRAS="cuda")


def test_a_gpu_needs_more_disk(clone):
    little = "#!/bin/bash\necho 'Filesystem 1048576-blocks Used Available'; echo '/dev/sda 90000 75000 15000 84% /'\n"
    (clone.bin / "df").unlink()
    (clone.bin / "df").write_text(little)
    (clone.bin / "df").chmod(0o755)
    assert clone.run("install", AGLITE_NEEDED_MB="", AGLITE_EXTRAS="cpu").returncode == 0
    assert "15000 MB free on this disk" in clone.fails("install", AGLITE_NEEDED_MB="", AGLITE_EXTRAS="gpu")


def test_a_changed_pyproject_installs_again_without_a_new_venv(clone):
    clone.run("install")
    with (clone.path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    done = clone.run("install")
    assert "installing aglite" in done.stdout and "making .venv" not in done.stdout


def test_another_python_makes_a_new_venv(clone):
    clone.run("install")
    (clone.path / ".venv" / ".python").write_text("Python 3.11.1")
    (clone.path / ".venv" / ".installed-cpu").unlink()
    assert "making .venv" in clone.run("install").stdout


def test_no_python(clone):
    (clone.bin / "python3.11").unlink()
    assert "no Python found; Python 3.11 is needed." in clone.fails()


def test_another_python_version(clone):
    message = clone.fails(FAKE_VERSION="3.13")
    assert "Python 3.11 is needed, but python3.11 is 3.13" in message and "apt install python3.11" in message


def test_a_shim_without_a_python_behind_it_is_passed_over(clone):
    (clone.bin / "python3.11").rename(clone.bin / "python3")
    (clone.bin / "python3.11").write_text("#!/bin/bash\necho 'pyenv: python3.11: command not found' >&2; exit 127\n")
    (clone.bin / "python3.11").chmod(0o755)
    assert "making .venv with python3" in clone.run("install").stdout


def test_a_named_python_is_used(clone):
    mine = clone.path / "mine"
    (clone.bin / "python3.11").rename(mine)
    assert f"making .venv with {mine}" in clone.run("install", PYTHON=str(mine)).stdout


def test_no_venv_module(clone):
    says = "The virtual environment was not created successfully because ensurepip is not available."
    assert "apt install python3.11-venv" in clone.fails(VENV_SAYS=says)


def test_no_disk(clone):
    assert "MB free on this disk, about 999999999 MB are needed." in clone.fails(AGLITE_NEEDED_MB="999999999")


@pytest.mark.parametrize(
    "says, said",
    [
        ("ERROR: [Errno 28] No space left on device", "the disk filled up while installing."),
        ("NewConnectionError: Temporary failure in name resolution", "the package index cannot be reached."),
        ("ERROR: No matching distribution found for torch==2.13.0", "pip failed; its last lines are above"),
    ],
)
def test_pip_fails(clone, says, said):
    message = clone.fails(PIP_SAYS=says)
    assert said in message
    assert not (clone.path / ".venv" / ".installed-cpu").exists()
    assert clone.run("install").returncode == 0, "the next try goes on from there"


def test_a_failed_fetch_stops_before_the_run(clone):
    clone.run("install")
    (clone.path / ".venv" / "bin" / "aglite").write_text('#!/bin/bash\necho "aglite $*"; exit 1\n')
    done = clone.run()
    assert done.returncode == 1 and "aglite up" not in done.stdout


def test_help_names_the_ways_to_call_it(clone):
    done = clone.run("--help")
    assert done.returncode == 0 and "quickstart.sh test" in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    done = subprocess.run(["shellcheck", ROOT / "quickstart.sh", ROOT / ".ci" / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_scripts_can_be_run():
    assert os.access(ROOT / "quickstart.sh", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)
