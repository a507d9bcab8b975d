"""The world that verl runs in: which device it computes on, and a process group of this process alone.

verl knows accelerators only. A CPU becomes one through verl's own registry of platforms; an NVIDIA GPU is verl's own.

`install` must run before any other verl module is imported: many of them read the device at import.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed

from aglite.errors import AgliteError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def resolve_device(wanted: str) -> str:
    """`cpu` or `cuda` for trainer.device. Raises AgliteError where torch sees no GPU and one is wanted."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise AgliteError(
            f"trainer.device is cuda, and {built}",
            "run `aglite doctor`, install the extra `gpu`, or use `device: cpu`",
        )
    return "cuda"


def install(device: str | None = None) -> None:
    """Make this process a verl world of one rank on `device` (default: what there is). Only the first call counts."""
    if torch.distributed.is_initialized():
        return
    device = resolve_device(device or "auto")
    # verl's Worker reads its place in the world from the environment; the address is never connected to
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    handle, rendezvous = tempfile.mkstemp(prefix="aglite-gloo-")
    os.close(handle)
    set_platform(device)
    _begin(device, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    os.unlink(rendezvous)


def join(device: str) -> None:
    """Take the place among several ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as
    verl's Ray worker groups and torchrun set it."""
    set_platform(device)
    _begin(device, init_method="env://")


def set_platform(device: str) -> None:
    """Tell verl what it computes on, before any other module of it is imported. Takes no memory of a GPU."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from verl.plugin.platform import set_platform

    if device == "cpu":
        from aglite.worker.verl_cpu import CpuPlatform

        set_platform(CpuPlatform())
    else:
        from verl.plugin.platform.platform_cuda import PlatformCUDA

        set_platform(PlatformCUDA())


def _begin(device: str, **rendezvous: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(BACKENDS[device], **rendezvous)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* engine is not available")  # engines for hardware that is not here
        import verl.workers.engine  # noqa: F401
