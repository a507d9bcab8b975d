"""The trainer's weights in parcels of GPU memory that another process can read, for vLLM's packed IPC transfer.

One buffer is filled again and again; each time, vLLM is told what lies in it and copies it out before the next filling.
So the transfer takes one buffer of memory, whatever the size of the model.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

BUFFER_BYTES = 256 * 2**20
"""Size of the buffer, or that of the largest tensor if it is larger."""

Share = Callable[[torch.Tensor], dict[str, tuple[Any, ...]]]
"""Gives the handle by which another process opens a buffer: {UUID of its GPU: arguments of rebuild_cuda_tensor}."""


def parcels(
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    device: str = "cuda",
    share: Share | None = None,
    size: int = BUFFER_BYTES,
) -> Iterator[dict[str, Any]]:
    """`weights` as `dtype`, in their order. Each parcel is the `update_info` of vLLM's `/update_weights`.

    The buffer holds the bytes of a parcel's tensors one after the other until the next parcel is asked for.
    """
    buffer, handle = torch.empty(0, dtype=torch.uint8, device=device), ""
    held: list[tuple[str, list[int], int]] = []
    used = 0
    for name, tensor in weights:
        length = tensor.numel() * dtype.itemsize
        if held and used + length > buffer.numel():
            yield _parcel(held, dtype, handle, device)
            held, used = [], 0
        if length > buffer.numel():
            del buffer  # before there is another one
            buffer = torch.empty(max(size, length), dtype=torch.uint8, device=device)
            handle = base64.b64encode(pickle.dumps((share or _share)(buffer))).decode()
        # .to(dtype) first: a tensor in host memory then crosses over in the smaller type
        flat = tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8)
        buffer[used : used + length].copy_(flat)
        held.append((name, list(tensor.shape), length))
        used += length
    if held:
        yield _parcel(held, dtype, handle, device)


def _parcel(held: list[tuple[str, list[int], int]], dtype: torch.dtype, handle: str, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()  # it is read by another process, which knows nothing of our queue
    return {
        "names": [name for name, _, _ in held],
        "shapes": [shape for _, shape, _ in held],
        "dtype_names": [str(dtype).removeprefix("torch.")] * len(held),
        "tensor_sizes": [length for _, _, length in held],
        "packed": True,
        "ipc_handles_pickled": handle,
    }


def _share(buffer: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return {uuid: reduce_tensor(buffer)[1]}
