"""What is told of GPUs whose driver does not tell everything."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from textual.content import Content

from aglite import headless
from aglite.engine.out_of_memory import holders
from aglite.gpus import called, gpus, holders_of
from aglite.tui.feed import Snapshot
from aglite.tui.widgets.host import HostLoad

GIB = 2**30


class Nvml:
    """pynvml with three GPUs: one that tells all, one that tells its memory only, and one that is lost."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 2:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-0":
            raise self.NVMLError("not found")
        return 0

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"NVIDIA Toy {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=6 * GIB, total=24 * GIB)

    def _told(self, handle: int, value: Any) -> Any:
        if handle:
            raise self.NVMLError("not supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._told(handle, SimpleNamespace(gpu=91))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return self._told(handle, 312_000)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        return self._told(handle, 61)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=4 * GIB)
        return self._told(handle, [SimpleNamespace(pid=2**30, usedGpuMemory=None), mine])


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aglite.gpus._nvml", Nvml())


def test_what_a_gpu_does_not_tell_is_none_and_a_lost_one_is_left_out() -> None:
    whole, part = gpus({os.getpid(): "vLLM"})
    assert (whole["util"], whole["power_w"], whole["temp_c"]) == (91, 312.0, 61)
    assert [(one["name"], one["mem"]) for one in whole["processes"]] == [("vLLM", 4 * GIB), (f"process {2**30}", None)]
    assert (part["mem_used"], part["mem_total"]) == (6 * GIB, 24 * GIB)
    assert (part["util"], part["power_w"], part["temp_c"], part["processes"]) == (None, None, None, [])


def test_holders_are_called_by_name_and_number_once() -> None:
    mine, other = holders_of("GPU-0")
    assert called(mine).endswith(f" (process {os.getpid()})") and called(other) == f"process {2**30}"
    assert holders_of("GPU-9") == []
    whole, part = holders({os.getpid(): "vLLM"})
    assert whole == f"GPU 0: 6.0 of 24.0 GiB in use: vLLM (process {os.getpid()}) 4.0 GiB, process {2**30}"
    assert part.endswith("by nobody we can see")


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aglite.gpus._nvml", False)
    assert gpus({}) == holders_of("GPU-0") == []


@pytest.mark.parametrize("height", [3, 12])
def test_it_is_drawn_without_what_is_not_told(height: int) -> None:
    machine = {"cpu_percent": 10.0, "cpus": 8, "ram_used": GIB, "ram_total": 8 * GIB, "disk_free": GIB, "db_bytes": 9}
    panel = HostLoad()
    panel.snapshot = Snapshot("live", {"host": machine, "gpu": gpus({})}, [])
    drawn = panel.draw(110, height, 0.0)
    assert isinstance(drawn, Content) and "91%" in drawn.plain and drawn.plain.count("6.0 GiB") == 2
    assert [headless.gpu(one) for one in gpus({})] == [
        "NVIDIA Toy 0  91% · 6.0 GiB of 24.0 GiB · 312 W · 61 °C",
        "NVIDIA Toy 1 · 6.0 GiB of 24.0 GiB",
    ]
