"""NVIDIA GPUs of this machine: their load, and who holds how much of their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psutil

_nvml: Any = None


def gpus(owners: Mapping[int, str]) -> list[dict[str, Any]]:
    """Every NVIDIA GPU's load, memory (bytes), power (W) and temperature (C), and who holds how much of its memory;
    [] where there is no driver. What a GPU does not tell, such as its load where it is divided (MIG), is None; one that
    does not even tell its memory is left out. `owners` names processes by id; the others are called by their program.
    """
    nvml = _driver()
    found = []
    for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            continue
        load, power = (
            _told(read, handle) for read in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetPowerUsage)
        )
        found.append(
            {
                "name": name,
                "util": None if load is None else load.gpu,
                "mem_used": memory.used,
                "mem_total": memory.total,
                "power_w": None if power is None else power / 1000,
                "processes": _holders(handle, owners),
                "temp_c": _told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            }
        )
    return found


def holders_of(uuid: str) -> list[dict[str, Any]]:
    """Who holds memory of the GPU with this UUID, as in `gpus`; [] where the driver does not tell."""
    nvml = _driver()
    handle = _told(nvml.nvmlDeviceGetHandleByUUID, uuid) if nvml else None
    return [] if handle is None else _holders(handle, {})


def called(holder: Mapping[str, Any]) -> str:
    """A process that holds memory, with its number: `vLLM (process 7)`."""
    number = _nameless(holder["pid"])
    return number if holder["name"] == number else f"{holder['name']} ({number})"


def _driver() -> Any:
    """The module pynvml where it finds a driver, otherwise False."""
    global _nvml
    if _nvml is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:  # no driver, no GPU: nothing to show, and nothing wrong
            _nvml = False
    return _nvml


def _told(read: Callable[..., Any], *given: Any) -> Any:
    """What the driver answers; None where it refuses, as many GPUs do of one thing or another."""
    try:
        return read(*given)
    except _nvml.NVMLError:
        return None


def _holders(handle: Any, owners: Mapping[int, str]) -> list[dict[str, Any]]:
    """Who holds memory of a GPU: `{"pid", "name", "mem"}` (bytes, null where the driver does not tell), most first."""
    held = [
        {"pid": process.pid, "name": _name(process.pid, owners), "mem": process.usedGpuMemory}
        for process in _told(_nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    ]
    return sorted(held, key=lambda row: -(row["mem"] or 0))


def _name(pid: int, owners: Mapping[int, str]) -> str:
    """Whose a process is: named itself, or a child of one that is."""
    try:
        process = psutil.Process(pid)
        line = [process, *process.parents()]
        return next((owners[each.pid] for each in line if each.pid in owners), process.name())
    except psutil.Error:  # of another user or container, or gone
        return _nameless(pid)


def _nameless(pid: int) -> str:
    return f"process {pid}"
