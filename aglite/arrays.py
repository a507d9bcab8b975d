"""Sequences of numbers: packed into bytes, little-endian, for the store's columns and the worker's socket; compared."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

Code = Literal["i", "f", "q"]
"""int32, float32, int64."""


def pack(code: Code, values: Iterable[float]) -> bytes:
    """Raises TypeError or OverflowError for what is no such number."""
    packed = values if isinstance(values, array) and values.typecode == code else array(code, values)
    if sys.byteorder == "big":
        packed = array(code, packed)
        packed.byteswap()
    return packed.tobytes()


def unpack(code: Code, data: bytes) -> array:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists of tokens."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
