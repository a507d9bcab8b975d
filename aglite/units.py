"""Numbers as people read them: times, sizes, counts, sparklines. Pure and small; shared by every kind of output."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
QUEUE = ("queued", "starting", "running", "grading", "done", "failed", "error", "cancelled")
"""States of a rollout in the order of its life."""
UNFINISHED = QUEUE[:4]

BROKEN = ("edited", "template", "retokenised")
"""Fork causes that break a conversation up; `first` and `new_thread` begin one."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clock(seconds: float | None) -> str:
    """A running time: `0:34`, `12:05`, `1:02:33`, `3d 04:10`."""
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def age(seconds: float | None) -> str:
    """How long ago, in at most four characters: `8s`, `12m`, `5h`, `3d`."""
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def count(number: float | None) -> str:
    """`812`, `12.3k`, `4.1M`."""
    if number is None:
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def size(number: float | None) -> str:
    """Bytes in binary units: `640 B`, `12.0 MiB`, `5.1 GiB`."""
    if number is None:
        return "–"
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def gib(number: float) -> str:
    """Bytes in GiB whatever they are, so that they can be compared: `0.4 GiB`, `69.2 GiB`."""
    return f"{number / 2**30:.1f} GiB"


def signal_name(number: int) -> str:
    """`SIGKILL`; most of the real-time signals have no name: `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reward(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}".replace("-0.00", "0.00")


def scientific(number: float | None) -> str:
    """`4e-5`, `1.5e6`: two digits and a power of ten."""
    if number is None:
        return "–"
    if number == 0:
        return "0"
    digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def sparkline(values: Sequence[float], width: int | None = None, *, floor: float | None = None) -> str:
    """The last `width` values as bars; a flat series is drawn at half height. With `floor` the lowest bar stands for
    that value, so that a rate of nothing looks like nothing."""
    shown = [value for value in values if math.isfinite(value)]
    if width is not None:
        shown = shown[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown) if floor is None else floor, max(shown)
    if high == low:
        return BARS[3 if floor is None else 0] * len(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in shown)


def progress(done: int, total: int, width: int) -> str:
    """A line of `width` cells, filled in proportion: `━━━━╸────`."""
    if total <= 0 or width <= 0:
        return "─" * max(0, width)
    halves = round(2 * width * min(max(done / total, 0.0), 1.0))
    full, half = divmod(halves, 2)
    return ("━" * full + "╸" * half).ljust(width, "─")


def versions(rollout: Mapping[str, Any]) -> str:
    """Policy versions that sampled a rollout: `v3`, `v3–5`, or nothing."""
    return version_span([rollout["policy_version_min"], rollout["policy_version_max"]])


def version_span(known: Sequence[int | None]) -> str:
    """The first and the last of policy versions in order: `v3`, `v3–5`, or nothing."""
    if not known or known[0] is None:
        return ""
    return f"v{known[0]}" if known[0] == known[-1] else f"v{known[0]}–{known[-1]}"


def forks(counts: Mapping[str, int]) -> str:
    """Calls that fork though they belong to a recorded conversation: `3 edited, 1 retokenised`, or nothing."""
    return ", ".join(f"{counts[cause]} {cause}" for cause in BROKEN if counts.get(cause))


def causes(counts: Mapping[str, int]) -> str:
    """Why rollouts ended other than well: `3 wall_time, 1 launch`, or nothing."""
    return ", ".join(f"{number} {code}" for code, number in counts.items())


def plain(text: str) -> str:
    """`text` without what a terminal would obey or cannot be sent: agents print escapes, and models write them."""
    if text.isprintable():
        return text
    return encodable(_CONTROLS.sub("", _ESCAPES.sub("", text)).expandtabs(8))


def encodable(text: str) -> str:
    """`text` with halves of characters, which are no UTF-8, spelled out (`\\udcff`). Python reads what is no UTF-8 in
    the name of a file as such, and errors quote names."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def plain_json(value: Any) -> Any:
    """Plain data with every text in it plain."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain_json(item) for key, item in value.items()}
    return value
