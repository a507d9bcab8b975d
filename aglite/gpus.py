"""NVIDIA GPUs of this machine: their load, and who holds how much of their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

_nvml: Any = None


def gpus(owners: Mapping[int, str]) -> list[dict[str, Any]]:
    """Every NVIDIA GPU's load, memory (bytes), power (W) and temperature (C), and who holds how much of its memory;
    [] where there is no driver. `owners` names processes by id; the others are called by their program."""
    global _nvml
    if _nvml is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:  # no driver, no GPU: nothing to show, and nothing wrong
            _nvml = False
    if not _nvml:
        return []
    found = []
    for index in range(_nvml.nvmlDeviceGetCount()):
        handle = _nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _nvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "name": _nvml.nvmlDeviceGetName(handle),
                "util": _nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "mem_used": memory.used,
                "mem_total": memory.total,
                "power_w": _nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "processes": _holders(handle, owners),
                "temp_c": _nvml.nvmlDeviceGetTemperature(handle, _nvml.NVML_TEMPERATURE_GPU),
            }
        )
    return found


def _holders(handle: Any, owners: Mapping[int, str]) -> list[dict[str, Any]]:
    """Who holds memory of a GPU: `{"pid", "name", "mem"}` (bytes, null where the driver does not tell), most first."""
    held = [
        {"pid": process.pid, "name": _name(process.pid, owners), "mem": process.usedGpuMemory}
        for process in _nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]
    return sorted(held, key=lambda row: -(row["mem"] or 0))


def _name(pid: int, owners: Mapping[int, str]) -> str:
    """Whose a process is: named itself, or a child of one that is."""
    try:
        process = psutil.Process(pid)
        line = [process, *process.parents()]
        return next((owners[each.pid] for each in line if each.pid in owners), process.name())
    except psutil.Error:  # of another user or container, or gone
        return f"process {pid}"
