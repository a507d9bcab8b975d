import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from packages import installed
from typer.testing import CliRunner

from aglite import doctor
from aglite.cli.app import app
from aglite.config import load_recipe
from aglite.doctor import Check
from aglite.paths import near_tmp

ROOT = Path(__file__).resolve().parents[1]


def test_a_fit_machine_has_no_errors_and_every_finding_is_named_once():
    found = doctor.checks()
    assert [check for check in found if check.status == "error"] == []
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    assert {"python", "torch", "verl", "memory", "disk", "models", "ports", "gpu", "docker", "kubernetes"} <= set(names)
    assert all(check.mend for check in found if check.status != "ok"), "what is not ok says what mends it"


def test_it_does_not_load_torch():
    code = (
        "import sys; from aglite.doctor import checks; checks(); print('torch' in sys.modules, 'verl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_wrong_python_is_an_error():
    assert doctor.python((3, 12, 1)).status == "error"
    assert doctor.python((3, 11, 2)).status == "ok"


def test_versions_are_compared_with_the_tried_ones():
    versions = {"torch": "2.13.0+cpu", "verl": "0.9.0", "transformers": "5.11.0", "tensordict": "0.10.0"}
    status = {check.name: check.status for check in doctor.packages(installed(versions))}
    assert status == {
        "torch": "ok",
        "verl": "warning",
        "transformers": "warning",
        "tensordict": "ok",
        "renderers": "error",
    }


@pytest.mark.parametrize("free, status", [(50e9, "ok"), (3e9, "warning"), (1e9, "error")])
def test_disk(tmp_path, free, status):
    assert doctor.disk(tmp_path, "disk", int(free)).status == status


def test_a_vllm_that_cannot_be_started_is_an_error(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delenv("AGLITE_VLLM", raising=False)
    assert doctor.vllm(lambda name: "0.24.0").status == "ok"
    missing = doctor.vllm(none)
    assert missing.status == "error" and missing.mend.startswith("AGLITE_EXTRAS=gpu bash quickstart.sh install")
    for given, said in (
        ("/no/such/python -m vllm", "there is no program /no/such/python"),
        ("'python -m vllm", "No closing quotation"),
    ):
        monkeypatch.setenv("AGLITE_VLLM", given)
        check = doctor.vllm(none)
        assert check.status == "error" and said in check.detail and check.mend
    monkeypatch.setenv("AGLITE_VLLM", f"{sys.executable} -m vllm")
    assert doctor.vllm(none).status == "ok"
    recipe = Path(__file__).parents[1] / "recipes" / "instruct"
    names = [[one.name for one in doctor.checks(load_recipe(recipe, given))] for given in ([], ["engine.kind=vllm"])]
    assert "vllm server" not in names[0] and "vllm server" in names[1]


def test_little_memory_is_a_warning():
    assert doctor.memory(4_000_000_000).status == "warning"


def test_an_empty_model_cache_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("AGLITE_CACHE", str(tmp_path))
    check = doctor.model_cache()
    assert check.status == "warning" and check.mend == "aglite model fetch smollm2-135m"


def test_docker_that_does_not_answer_is_a_warning(tmp_path, monkeypatch):
    import socket

    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory(dir=near_tmp(40)) as short:
        path = f"{short}/docker.sock"
        server.bind(path)  # bound but not listening: connections are refused
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        assert doctor.docker().status == "warning"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert doctor.docker().status == "ok"


@pytest.mark.parametrize(
    ("address", "detail", "mend"),
    [
        ("unix://{folder}/none", "there is no such socket", "start the Docker Engine"),
        ("tcp://10.0.0.1:2375", "docker needs an engine on this machine", "unset DOCKER_HOST"),
    ],
)
def test_a_recipe_with_an_image_needs_an_engine_of_this_machine(tmp_path, monkeypatch, address, detail, mend):
    monkeypatch.setenv("DOCKER_HOST", address.format(folder=tmp_path))
    recipe = load_recipe(ROOT / "recipes" / "instruct", ["agent.image=any"])
    (check,) = [check for check in doctor.checks(recipe) if check.name == "sandbox"]
    assert check.status == "error" and detail in check.detail and mend in check.mend


def test_kubernetes_configuration_is_found_or_missed(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert doctor.kubernetes().status == "warning"
    config.write_text("")
    assert str(config) in doctor.kubernetes().detail


class _Nvml:
    """The few calls of pynvml that are used, for a machine with one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken=False, cuda=13000):
        self.broken = broken
        self.cuda = cuda

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Info", (), {"total": 80_000_000_000})

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA A100"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda


def test_gpu():
    assert "no NVIDIA GPU" in doctor.gpu(_Nvml(broken=True)).detail
    both, found = installed({"torch": "2.11.0", "vllm": "0.24.0"}), "NVIDIA A100 (80 GB), driver 580.1 for CUDA"
    assert doctor.gpu(_Nvml(), both) == Check("gpu", "ok", f"{found} 13.0")
    old = doctor.gpu(_Nvml(cuda=12080), both)
    assert old.status == "error" and old.detail.startswith(f"{found} 12.8; ") and old.mend == "update the driver"
    without = doctor.gpu(_Nvml(), installed({"torch": "2.13.0+cpu"}))
    assert without.status == "warning" and without.mend == "AGLITE_EXTRAS=gpu bash quickstart.sh install"


def test_the_command_prints_json(tmp_path):
    done = subprocess.run([sys.executable, "-m", "aglite", "doctor", "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert {"name", "status", "detail", "mend"} == set(found[0])


@pytest.mark.parametrize(
    ("options", "named", "mend"),
    [
        (["--only", "cuda"], "--only", "add --selftest gpu"),
        (["--selftest", "gpu", "--set", "trainer.lr=1"], "--set", "name one"),
        (["--selftest", "gpu", "--gpu-gib", "40"], "--gpu-gib", "leave out one"),
        (["--set", "trainer.lr=1"], "--set", "name one"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, named, mend, monkeypatch):
    """Not only the one that was forgotten: nothing is looked at before."""
    monkeypatch.setattr(doctor, "checks", lambda *_, **__: pytest.fail("it goes on without the option"))
    done = CliRunner().invoke(app, ["doctor", *options])
    words = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and named in words and mend in words


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    check = doctor.disk(tmp_path, "disk", free_bytes=10**12)
    assert check.status == "error" and f"{tmp_path} cannot be written" in check.detail and "--dir" in check.mend
