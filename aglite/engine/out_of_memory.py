"""What is said when an accelerator has no memory left: who holds it, and which setting to change."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aglite.errors import EngineError
from aglite.gpus import called, gpus
from aglite.units import gib

_WORDS = re.compile(
    r"out of memory|OutOfMemory|No available memory for the cache blocks|KV cache is needed, which is larger"
    r"|less than desired GPU memory utilization|not enough memory",
    re.IGNORECASE,
)

MENDS = {
    "start": "lower engine.gpu_memory_utilization if something else needs the GPU too, or raise it if the KV cache is "
    "too small; lower engine.context_length or engine.max_running; end other programs on this GPU",
    "train": "lower trainer.tokens_per_micro_batch, or set trainer.gradient_checkpointing or trainer.offload_optimizer",
    "wake": "lower engine.gpu_memory_utilization: what it promises vLLM must be free beside what the trainer keeps; "
    "trainer.offload_optimizer leaves more",
    "transfer": "set `engine.transfer: folder`, which needs no second copy on the GPU, or lower "
    "engine.gpu_memory_utilization",
}
"""What to change, by what was being done."""


class OutOfMemory(EngineError):
    """The accelerator's memory did not suffice."""


def is_out_of_memory(words: str) -> bool:
    return bool(_WORDS.search(words))


def out_of_memory(who: str, doing: str, words: str, owners: Mapping[int, str]) -> OutOfMemory:
    """`doing` is one of MENDS; `owners` names processes of the run by id."""
    first = next((line.strip() for line in words.splitlines() if is_out_of_memory(line)), words.strip())
    held = "".join(f"\n  | {line}" for line in holders(owners))
    return OutOfMemory(f"{who} ran out of memory: {first[:400]}{held}", MENDS[doing])


def holders(owners: Mapping[int, str]) -> list[str]:
    """Who holds the memory of each GPU, most first; [] without one."""
    lines = []
    for index, gpu in enumerate(gpus(owners)):
        used, total = (value / 2**30 for value in (gpu["mem_used"], gpu["mem_total"]))
        each = [called(one) + (f" {gib(one['mem'])}" if one["mem"] else "") for one in gpu["processes"]]
        lines.append(f"GPU {index}: {used:.1f} of {total:.1f} GiB in use: {', '.join(each) or 'by nobody we can see'}")
    return lines
