"""A CPU as one of verl's platforms, through verl's own registry: verl itself knows accelerators only."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _cpu_device_module() -> types.SimpleNamespace:
    """`torch.cpu` with the memory and random-state functions that verl expects of every device module."""
    names = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    nothing = {name: lambda *_: None for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats")}
    no_bytes = {
        name: lambda *_: 0
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    }
    return types.SimpleNamespace(
        **names
        | nothing
        | no_bytes
        | {
            "mem_get_info": lambda *_: (1, 1),
            "get_device_name": lambda *_: "CPU",
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
        }
    )


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _cpu_device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl passes it to `.to()`, where an index would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
