"""`aglite doctor`: is this machine fit, and if not, what mends it. Quick; imports neither torch nor verl."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from aglite.builtin_models import BUILTIN, cache_dir, is_cached
from aglite.config import Notify, Recipe
from aglite.errors import AgliteError, RecipeError
from aglite.harnesses import HARNESSES
from aglite.harnesses.find import find, version_of
from aglite.memory_plan.card import Card, helps, planned_for, present_card, shape_of, uses_gpu
from aglite.memory_plan.plan import GIB, Plan
from aglite.net import Certificate
from aglite.notify import program_of
from aglite.rollouts.backends.cgroups import Cgroups, NoCgroups, find_places
from aglite.rollouts.backends.docker import check_engine
from aglite.rollouts.backends.engine import connect
from aglite.rollouts.backends.local import WITHOUT_CGROUPS
from aglite.rollouts.environment import harness_folder, prompt_of
from aglite.tasks import load_tasks
from aglite.versions import findings, installed_set, reinstall

Status = Literal["ok", "warning", "error"]

REINSTALL = "bash quickstart.sh install"
CGROUPS_MEND = "use containers (agent.image), or start with: systemd-run --user --scope -p Delegate=yes aglite up ..."
GPU_CUDA = (13, 0)
"""What torch 2.11.0 and vLLM 0.24.0 are built for, as PyPI has them."""
MIN_FREE_GB = 6
MIN_MEMORY_GB = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `mend` is empty where there is nothing to mend."""

    name: str
    status: Status
    detail: str
    mend: str = ""
    plan: Plan | None = None
    """The memory plan that it is about."""
    card: str = ""
    """The GPU of the plan."""

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("name", "status", "detail", "mend")}
        return {**found, "card": self.card, "plan": self.plan.as_json()} if self.plan else found


def checks(recipe: Recipe | None = None, *, gpu_gib: float | None = None) -> list[Check]:
    """Everything worth knowing about this machine, in the order a newcomer meets it, and whether what `recipe` needs is
    here. Takes about a second, and as long as the recipe takes to yield its tasks. `gpu_gib`: plan the recipe's memory
    for a GPU of so many GiB, not for the one that is here."""
    backend = recipe.agent.backend if recipe else None
    return [
        python(),
        *packages(),
        *([vllm()] if recipe and recipe.engine.own_vllm and gpu_gib is None else []),
        memory(),
        disk(Path.cwd(), "disk"),
        model_cache(),
        port(),
        gpu(),
        *([gpu_memory(recipe, gpu_gib)] if recipe and (gpu_gib or uses_gpu(recipe)) else []),
        local_agents(),
        docker(),
        kubernetes(),
        *([sandbox(recipe)] if recipe and backend == "docker" else []),
        *([cluster(recipe), gateway_address(recipe)] if recipe and backend == "kubernetes" else []),
        harness(recipe) if recipe and recipe.agent.harness and not recipe.agent.in_container else harnesses(),
        *([prompts(recipe)] if recipe and recipe.agent.harness else []),
        *([notify(recipe.folder, recipe.notify)] if recipe and recipe.notify else []),
    ]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    found = ".".join(map(str, version))
    if version[:2] == (3, 11):
        return Check("python", "ok", f"{found} ({sys.executable})")
    return Check("python", "error", f"{found}; 3.11 is needed", "install Python 3.11, then " + REINSTALL)


def packages(installed: Callable[[str], str] = metadata.version) -> list[Check]:
    """One check for each package whose version matters."""
    found = []
    for one in findings(installed=installed):
        status: Status = "ok" if one.fits else "error" if one.version is None else "warning"
        found.append(Check(one.name, status, one.detail, "" if one.fits else one.mend))
    return found


def vllm(installed: Callable[[str], str] = metadata.version) -> Check:
    """Whether there is a vLLM to start for a recipe that wants one; it is not started."""
    from aglite.engine.vllm_server import NO_PROGRAM, command

    name = "vllm server"
    try:
        program = command()[0]
    except AgliteError as error:
        return Check(name, "error", error.message, error.mend)
    if given := os.environ.get("AGLITE_VLLM"):
        if shutil.which(program) is None:
            return Check(name, "error", f"AGLITE_VLLM: there is no program {program}", NO_PROGRAM)
        return Check(name, "ok", f"it will be started by AGLITE_VLLM: {given}")
    try:
        return Check(name, "ok", f"vLLM {installed('vllm')} of this Python will be started")
    except metadata.PackageNotFoundError:
        mend = f"{reinstall('gpu')}, or let AGLITE_VLLM name one (docs/engines.md)"
        return Check(name, "error", "vLLM is not installed, and engine.kind is vllm", mend)


def memory(total_bytes: int | None = None) -> Check:
    if total_bytes is None:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gigabytes = total_bytes / 1e9
    if gigabytes >= MIN_MEMORY_GB:
        return Check("memory", "ok", f"{gigabytes:.0f} GB, {os.cpu_count()} CPU cores")
    mend = "lower trainer.tokens_per_micro_batch and agent.concurrency"
    return Check("memory", "warning", f"{gigabytes:.1f} GB; the demo recipe was tried with {MIN_MEMORY_GB} GB", mend)


def disk(path: Path, name: str, free_bytes: int | None = None) -> Check:
    if not os.access(path, os.W_OK):
        return Check(
            name, "error", f"{path} cannot be written", "call aglite in a folder that you may write to, or use --dir"
        )
    free = (shutil.disk_usage(path).free if free_bytes is None else free_bytes) / 1e9
    if free >= MIN_FREE_GB:
        return Check(name, "ok", f"{free:.0f} GB free in {path}")
    status: Status = "warning" if free >= 2 else "error"
    mend = "free some disk; below trainer.min_free_disk_mb a run pauses"
    return Check(name, status, f"{free:.1f} GB free in {path}; {MIN_FREE_GB} GB are comfortable", mend)


def model_cache() -> Check:
    folder = cache_dir()
    there = [name for name in BUILTIN if is_cached(name)]
    if there:
        return Check("models", "ok", f"{', '.join(there)} in {folder}")
    return Check("models", "warning", f"none in {folder}", f"aglite model fetch {next(iter(BUILTIN))}")


def port(host: str = "127.0.0.1") -> Check:
    """Whether agents on this machine will be able to reach the gateway on loopback."""
    try:
        with socket.create_server((host, 0)) as server:
            number = server.getsockname()[1]
            with socket.create_connection((host, number), timeout=2):
                return Check("ports", "ok", f"{host} answers (tried {number})")
    except OSError as error:
        return Check("ports", "error", f"{host} cannot be used: {error}", "allow connections over the loopback device")


def gpu(nvml: Any = None, installed: Callable[[str], str] = metadata.version) -> Check:
    """Which GPUs are here, and whether what is installed can use them."""
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
        cuda = divmod(nvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
        found = f"{', '.join(names)}, driver {nvml.nvmlSystemGetDriverVersion()} for CUDA {cuda[0]}.{cuda[1]}"
        return _usable_gpu(found, cuda, installed)
    except nvml.NVMLError as error:
        return Check("gpu", "warning", f"the driver answers with an error: {error}", "see nvidia-smi")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _usable_gpu(found: str, cuda: tuple[int, int], installed: Callable[[str], str]) -> Check:
    if installed_set(installed) == "gpu":
        if cuda < GPU_CUDA:
            wanted = ".".join(map(str, GPU_CUDA))
            return Check(
                "gpu", "error", f"{found}; torch of the extra `gpu` is built for {wanted}", "update the driver"
            )
        return Check("gpu", "ok", found)
    detail = f"{found}; what is installed trains on the CPU"
    return Check("gpu", "warning", detail, reinstall("gpu"))


def gpu_memory(recipe: Recipe, gib: float | None = None, nvml: Any = None) -> Check:
    """Whether the recipe fits a GPU: the one that is here, or one of `gib` GiB."""
    name = "gpu memory"
    if not uses_gpu(recipe):
        where = "trainer.device is cpu" if recipe.engine.kind == "embedded" else f"its engine is at {recipe.engine.url}"
        return Check(name, "ok", f"nothing of the recipe is computed on a GPU here: {where}")
    card = present_card(nvml) if gib is None else Card(f"a GPU of {gib:g} GiB", int(gib * GIB))
    if card is None:
        return Check(name, "ok", "no GPU here to plan for; --gpu-gib 80 plans for one of 80 GiB")
    try:
        shape = shape_of(recipe.model)
    except AgliteError as error:
        return Check(name, "warning", error.message, error.mend)
    plan = planned_for(recipe, shape, card, here=gib is None)
    peak = f"{plan.peak.total / GIB:.1f} of {plan.usable / GIB:.1f} GiB at most ({plan.peak.name})"
    if plan.fits:
        return Check(name, "ok", f"fits {card.name}: {peak}", "", plan, card.name)
    mend = helps(recipe, shape, card, here=gib is None)
    return Check(name, "error", f"does not fit {card.name}: {'; '.join(plan.problems)}", mend, plan, card.name)


def local_agents() -> Check:
    """Whether agents without a container can be limited and ended as a whole; they are never kept from anything."""
    exposed = "they reach the network and your files"
    try:
        cgroups = Cgroups(find_places(), f"try@doctor-{os.getpid()}")
        cgroups.try_out()
    except NoCgroups as error:
        return Check("local agents", "warning", f"{exposed}; {WITHOUT_CGROUPS.format(error)}", CGROUPS_MEND)
    return Check("local agents", "ok", f"{exposed}; limited by control groups: {cgroups}")


def docker() -> Check:
    """Local agents do without, so never more than a warning."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if address.startswith("unix://") and not Path(address.removeprefix("unix://")).exists():
        return Check("docker", "ok", "not there; local agents do not need it")
    try:
        with contextlib.closing(connect(timeout_s=3)) as client:
            return Check("docker", "ok", f"engine {client.version()['Version']} answers at {address}")
    except AgliteError as error:
        return Check("docker", "warning", error.message, error.mend)


def sandbox(recipe: Recipe) -> Check:
    """Whether Docker answers and has the image that the recipe names."""
    try:
        found = check_engine(recipe.agent)
    except RecipeError as error:
        return Check("sandbox", "error", error.message, error.mend)
    detail = f"{found['image']} ({found['image_id'].removeprefix('sha256:')[:12]}), engine {found['docker']}"
    return Check("sandbox", "ok", f"{detail}, network {recipe.agent.network}")


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


def cluster(recipe: Recipe) -> Check:
    """Whether the recipe's cluster answers and allows what a run needs; what its templates make is not tried."""
    from aglite.rollouts.backends.kube.check import check_recipe

    try:
        found = asyncio.run(check_recipe(recipe))
    except RecipeError as error:
        return Check("cluster", "error", error.message, error.mend)
    detail = f"{found['host']}, Kubernetes {found['version']}, namespace {found['namespace']}"
    return Check("cluster", "ok", f"{detail}, network {recipe.agent.network}")


def gateway_address(recipe: Recipe) -> Check:
    """Whether the address that pods are given leads to this machine, as far as can be seen from here: something listens
    where the gateway will, and is called at that address."""
    from aglite.rollouts.backends.kube.manifests import gateway_of

    settings, name = recipe.gateway, "gateway address"
    try:
        gateway = gateway_of(str(settings.public_url))
    except RecipeError as error:
        return Check(name, "error", error.message, error.mend)
    place = f"{settings.public_url} ({', '.join(gateway.addresses)} port {gateway.port})"
    if gateway.is_loopback:
        return Check(name, "error", f"{place} is the pod itself", "write an address of this machine's network")
    if settings.tls:
        try:
            Certificate(recipe.folder / settings.tls.cert, recipe.folder / settings.tls.key).check("gateway.tls")
        except RecipeError as error:
            return Check(name, "error", error.message, error.mend)
    try:
        with socket.create_server((settings.host, settings.port)) as server:
            server.settimeout(3)
            for address in gateway.addresses:
                with socket.create_connection((address, gateway.port), timeout=3):
                    server.accept()[0].close()
    except OSError as error:
        mend = (
            f"let the gateway listen at that address: gateway.host (it is {settings.host}) and gateway.port (it is "
            f"{settings.port}); if a proxy or a port forwarding stands between, try it from a pod"
        )
        return Check(name, "warning", f"{place} does not lead here: {error}", mend)
    return Check(name, "ok", f"{place} leads here; whether pods reach it shows when one runs")


def harnesses() -> Check:
    """Which of the agent programs that a recipe can name are installed; none has to be."""
    found = []
    for one in HARNESSES.values():
        with contextlib.suppress(RecipeError):
            program = find(one, None)
            found.append(f"{one.name} {version_of(one, program) or ''}".strip())
    return Check("harnesses", "ok", f"on PATH: {', '.join(found) or 'none'}; only recipes that name one need it")


def harness(recipe: Recipe) -> Check:
    """Whether the agent program that the recipe names is installed, in the version its preset was tested with."""
    one = HARNESSES[str(recipe.agent.harness)]
    try:
        program = find(one, harness_folder(recipe))
    except RecipeError as error:
        return Check("harness", "error", error.message, error.mend)
    version = version_of(one, program)
    if version == one.version:
        return Check("harness", "ok", f"{one.name} {version} ({program})")
    return Check(
        "harness", "warning", f"{one.name} {version or 'of unknown version'}; tested: {one.version}", one.install
    )


def prompts(recipe: Recipe) -> Check:
    """Whether each task of the recipe says what the harness is to do."""
    try:
        rows = [
            row for split in ("train", "val") for row in load_tasks(getattr(recipe.tasks, split), recipe.folder, split)
        ]
        for row in rows:
            prompt_of(recipe, row)
    except RecipeError as error:
        return Check("prompts", "error", error.message, error.mend)
    return Check("prompts", "ok", f"all {len(rows)} tasks say what to do")


def notify(folder: Path, settings: Notify) -> Check:
    """Whether whom the recipe wants told can be: the program is there, the address known. Nothing is sent."""
    if settings.command and program_of(settings.command, folder) is None:
        mend = "install it, or write its path in the recipe folder, such as ./tell.sh (and make it executable)"
        return Check("notify", "error", f"notify.command: there is no program {settings.command[0]}", mend)
    url = settings.url or os.environ.get(settings.url_env, "")
    if settings.url_env and not url:
        mend = f"export {settings.url_env}=https://... before `aglite up`"
        return Check("notify", "error", f"notify.url_env: {settings.url_env} is not set", mend)
    whom = [*settings.command[:1], *([urlsplit(url).hostname or settings.url_env] if url else [])]
    return Check("notify", "ok", f"{' and '.join(whom)} will be told: {', '.join(settings.on)}")
