"""What the ranks of a trainer share: the micro-batches of a step, and what each of them finds.

Every rank runs the same program on the same batch. FSDP's collectives need all of them at the same passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


def count() -> int:
    return dist.get_world_size()


def first() -> bool:
    """Whether this is the rank that writes files and reports."""
    return dist.get_rank() == 0


def share(parts: list[list[int]]) -> Iterator[tuple[list[int], bool]]:
    """This rank's micro-batches, and whether each counts. All ranks get as many: where there are too few, the first one
    is computed once more, for the sake of the collectives, and does not count."""
    for begin in range(0, len(parts), count()):
        at = begin + dist.get_rank()
        yield (parts[at], True) if at < len(parts) else (parts[0], False)


def gather(one: Any) -> list[Any]:
    """What every rank has, in their order."""
    if count() == 1:
        return [one]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, one)
    return found
