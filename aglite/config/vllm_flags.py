"""Flags of `vllm serve` in `engine.args`: which ones are refused, and those that the memory plan reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SETTINGS = {
    "--max-model-len": "engine.context_length",
    "--max-num-seqs": "engine.max_running",
    "--gpu-memory-utilization": "engine.gpu_memory_utilization",
    "--dtype": "engine.dtype",
    "--enforce-eager": "engine.enforce_eager",
    "--model": "model",
    "--seed": "seed",
}
"""Flags that are settings of the recipe: said twice, the memory plan and the check of the weights would go by one and
vLLM by the other."""
OURS = (
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--root-path",
    "--logprobs-mode",
    "--generation-config",
    "--enable-sleep-mode",
    "--weight-transfer-config",
)
"""Flags that say how aglite speaks to its own vLLM."""
PARALLEL = ("--tensor-parallel-size", "-tp")
BATCHED = ("--max-num-batched-tokens",)

_SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def count(args: Sequence[str], names: Sequence[str]) -> int | None:
    """The number that a flag gives, the last one if there are several; None without it. As vLLM reads it: `8k` is
    8,000, `8K` 8,192. Raises ValueError for what is no number above 0."""
    found = None
    for name, value in _flags(args):
        if name in names:
            number = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value or "")
            found = int(float(number[1]) * _SUFFIXES[number[2]]) if number else 0
            if found < 1:
                raise ValueError(f"{name} is {value or ''!r}; give it a number above 0, such as 8192 or 8k")
    return found


def flag_problems(args: Sequence[str]) -> list[str]:
    """What `engine.args` must not say."""
    problems = []
    for name, _ in _flags(args):
        name = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        if name in SETTINGS:
            problems.append(f"engine.args: {name} has a setting of its own; use `{SETTINGS[name]}`")
        elif name in OURS:
            problems.append(f"engine.args: {name} is aglite's to say, which alone speaks to this vLLM; leave it out")
    for names in (PARALLEL, BATCHED):
        try:
            count(args, names)
        except ValueError as error:
            problems.append(f"engine.args: {error}")
    return problems


def _flags(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag with the value that follows it, if one does. vLLM takes `_` for `-` in the names of flags."""
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if not name.startswith("-") or re.match(r"-\d", name):
            continue
        after = next(iter(args[place + 1 : place + 2]), None)
        yield name.replace("_", "-"), value if equals else after
