"""`aglite doctor`: is this machine fit, and if not, what mends it. Quick; imports neither torch nor verl."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from aglite import models

Status = Literal["ok", "warning", "error"]

TRIED = {
    "torch": "2.13.0",
    "verl": "0.9.1",
    "transformers": "5.5.3 to 5.10",
    "tensordict": "0.10.0",
    "renderers": "0.1.12",
}
"""The versions that were tried together."""

REINSTALL = "bash quickstart.sh install"
MIN_FREE_GB = 6
MIN_MEMORY_GB = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `mend` is empty where there is nothing to mend."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def checks() -> list[Check]:
    """Everything worth knowing about this machine, in the order a newcomer meets it. Takes about a second."""
    return [
        python(),
        *packages(),
        memory(),
        disk(Path.cwd(), "disk"),
        model_cache(),
        port(),
        gpu(),
        docker(),
        kubernetes(),
    ]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    found = ".".join(map(str, version))
    if version[:2] == (3, 11):
        return Check("python", "ok", f"{found} ({sys.executable})")
    return Check("python", "error", f"{found}; 3.11 is needed", "install Python 3.11, then " + REINSTALL)


def packages(installed: Callable[[str], str] = metadata.version) -> list[Check]:
    """One check for each package whose version matters."""
    found = []
    for name, tried in TRIED.items():
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            needed_for = "for everything" if name == "renderers" else "for training and the embedded engine"
            found.append(Check(name, "error", f"not installed; needed {needed_for}", REINSTALL))
            continue
        fits = _fits(name, version)
        detail = version if fits else f"{version}; tried with {tried}"
        found.append(Check(name, "ok" if fits else "warning", detail, "" if fits else REINSTALL))
    return found


def _fits(name: str, version: str) -> bool:
    if name == "transformers":
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        return (5, 5, 3) <= numbers < (5, 11)
    return version.partition("+")[0] == TRIED[name]


def memory(total_bytes: int | None = None) -> Check:
    if total_bytes is None:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gigabytes = total_bytes / 1e9
    if gigabytes >= MIN_MEMORY_GB:
        return Check("memory", "ok", f"{gigabytes:.0f} GB, {os.cpu_count()} CPU cores")
    mend = "lower trainer.tokens_per_micro_batch and agent.concurrency"
    return Check("memory", "warning", f"{gigabytes:.1f} GB; the demo recipe was tried with {MIN_MEMORY_GB} GB", mend)


def disk(path: Path, name: str, free_bytes: int | None = None) -> Check:
    free = (shutil.disk_usage(path).free if free_bytes is None else free_bytes) / 1e9
    if free >= MIN_FREE_GB:
        return Check(name, "ok", f"{free:.0f} GB free in {path}")
    status: Status = "warning" if free >= 2 else "error"
    mend = "free some disk; below trainer.min_free_disk_mb a run pauses"
    return Check(name, status, f"{free:.1f} GB free in {path}; {MIN_FREE_GB} GB are comfortable", mend)


def model_cache() -> Check:
    folder = models.cache_dir()
    there = [name for name in models.BUILTIN if models.is_cached(name)]
    if there:
        return Check("models", "ok", f"{', '.join(there)} in {folder}")
    return Check("models", "warning", f"none in {folder}", f"aglite model fetch {next(iter(models.BUILTIN))}")


def port(host: str = "127.0.0.1") -> Check:
    """Whether agents on this machine will be able to reach the gateway on loopback."""
    try:
        with socket.create_server((host, 0)) as server:
            number = server.getsockname()[1]
            with socket.create_connection((host, number), timeout=2):
                return Check("ports", "ok", f"{host} answers (tried {number})")
    except OSError as error:
        return Check("ports", "error", f"{host} cannot be used: {error}", "allow connections over the loopback device")


def gpu(nvml: Any = None) -> Check:
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Check("gpu", "ok", "no NVIDIA GPU found; training runs on the CPU")
    try:
        names = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            size = nvml.nvmlDeviceGetMemoryInfo(handle).total / 1e9
            name = nvml.nvmlDeviceGetName(handle)
            names.append(f"{name.decode() if isinstance(name, bytes) else name} ({size:.0f} GB)")
        if not names:
            return Check("gpu", "ok", "no NVIDIA GPU found; training runs on the CPU")
        return Check("gpu", "ok", f"{', '.join(names)}, driver {nvml.nvmlSystemGetDriverVersion()}")
    except nvml.NVMLError as error:
        return Check("gpu", "warning", f"the driver answers with an error: {error}", "see nvidia-smi")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def docker() -> Check:
    """Local agents do without, so never more than a warning."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if address.startswith("unix://") and not Path(address.removeprefix("unix://")).exists():
        return Check("docker", "ok", "not there; local agents do not need it")
    import docker as sdk

    try:
        client = sdk.from_env(timeout=3)
        with contextlib.closing(client):
            return Check("docker", "ok", f"engine {client.version()['Version']} answers at {address}")
    except Exception as error:  # the SDK lets errors of its HTTP client through as well
        text = str(error)
        mend = (
            "add yourself to the group docker and log in again" if "Permission" in text else "start the Docker Engine"
        )
        return Check("docker", "warning", f"{address} does not answer: {text[:120]}", mend)


def kubernetes() -> Check:
    """Whether a cluster is configured."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return Check("kubernetes", "ok", "running inside a cluster")
    named = os.environ.get("KUBECONFIG")
    files = [Path(name) for name in named.split(os.pathsep) if name] if named else [Path.home() / ".kube" / "config"]
    there = [file for file in files if file.is_file()]
    if there:
        return Check("kubernetes", "ok", f"configuration {there[0]}")
    if named:
        return Check(
            "kubernetes", "warning", f"KUBECONFIG names {named}, which is no file", "correct or unset KUBECONFIG"
        )
    return Check("kubernetes", "ok", "no configuration; local agents do not need one")
