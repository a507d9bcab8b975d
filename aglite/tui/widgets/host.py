"""The machine: CPU, memory, disk, database; each GPU where there is one."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from aglite import units
from aglite.tui.widgets.panel import Panel, faint, gauge, lines, row


class HostLoad(Panel):
    BORDER_TITLE = "machine"

    def draw(self, width: int, height: int, now: float) -> Content:
        status = self.snapshot.status or {}
        host, gpus = status.get("host") or {}, status.get("gpu") or []
        if not host:
            return Content("")
        if height < 4:
            return self._flat(host, gpus, width)
        bars: list[tuple[str, float | None, str]] = []
        if host.get("cpu_percent") is not None:
            bars.append(("CPU", host["cpu_percent"] / 100, f"{host['cpus']} cores" if host.get("cpus") else ""))
        if host.get("ram_total"):
            bars.append(("RAM", host["ram_used"] / host["ram_total"], _of(host["ram_used"], host["ram_total"])))
        for gpu in gpus:
            load = None if gpu["util"] is None else gpu["util"] / 100
            bars.append(("GPU", load, gpu["name"].removeprefix("NVIDIA ") + _heat(gpu)))
            bars.append(("mem", gpu["mem_used"] / gpu["mem_total"], _of(gpu["mem_used"], gpu["mem_total"])))
        room = width - 12 - max((len(text) for *_, text in bars), default=0)
        rows = [self._bar(name, share, text, min(max(room, 5), 40), width) for name, share, text in bars]
        rows += [self._owners(gpu, width) for gpu in gpus if gpu.get("processes")]
        rows.append(self._files(host, width))
        return lines(*rows[:height])

    def _owners(self, gpu: dict[str, Any], width: int) -> Content:
        """Who holds the memory of a GPU."""
        parts: list[Any] = [("     held by ", "$faint")]
        for holder in gpu["processes"]:
            parts += [holder["name"], (f" {units.size(holder['mem'])}  ", "$faint")]
        return Content.assemble(*parts).truncate(width, ellipsis=True)

    def _bar(self, name: str, share: float | None, text: str, size: int, width: int) -> Content:
        if share is None:  # nobody tells
            return row(Content.assemble((f" {name} ", "$faint"), "–"), faint(text + " "), width)
        style = "$warning" if share > 0.9 and name in ("RAM", "mem") else "$primary"
        bar = gauge(share, size, style)
        return row(Content.assemble((f" {name} ", "$faint"), bar, f" {share:>4.0%}"), faint(text + " "), width)

    def _files(self, host: dict[str, Any], width: int) -> Content:
        parts = [(" disk ", "$faint"), f"{units.size(host['disk_free'])} free"] if host.get("disk_free") else []
        if host.get("db_bytes") is not None:
            parts += [("  database ", "$faint"), units.size(host["db_bytes"])]
        return Content.assemble(*parts).truncate(width, ellipsis=True)

    def _flat(self, host: dict[str, Any], gpus: list[dict[str, Any]], width: int) -> Content:
        """As much as fits, what changes fastest first."""
        items = []
        if host.get("cpu_percent") is not None:
            items.append(("CPU", f"{host['cpu_percent']:.0f}%"))
        if host.get("ram_used") is not None:
            items.append(("RAM", units.size(host["ram_used"])))
        for gpu in gpus:
            load = "" if gpu["util"] is None else f"{gpu['util']:.0f}% "
            items.append(("GPU", load + units.size(gpu["mem_used"])))
        if host.get("db_bytes") is not None:
            items.append(("db", units.size(host["db_bytes"])))
        if host.get("disk_free") is not None:
            items.append(("disk", units.size(host["disk_free"])))
        text = Content("")
        for name, value in items:
            longer = Content.assemble(text, "  " if text.cell_length else "", (f"{name} ", "$faint"), value)
            if longer.cell_length + 1 > width:
                break
            text = longer
        return row(Content(""), Content.assemble(text, " "), width)


def _of(used: float, total: float) -> str:
    return f"{units.size(used)} of {units.size(total)}"


def _heat(gpu: dict[str, Any]) -> str:
    power = f" {gpu['power_w']:.0f} W" if gpu.get("power_w") is not None else ""
    heat = f" {gpu['temp_c']:.0f} °C" if gpu.get("temp_c") is not None else ""
    return power + heat
