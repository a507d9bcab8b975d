"""The weights in parcels of one buffer: what lies in it when a parcel is given out is what the parcel says."""

import base64
import pickle

import pytest
import torch

from aglite.worker.parcels import parcels

SHAPES = [(7, 5), (3,), (40, 10), (2, 2, 2), (1,)]


@pytest.mark.parametrize("size", [1, 64, 10_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_comes_once_in_order_and_whole(size, dtype):
    torch.manual_seed(0)
    weights = [(f"w{n}", torch.randn(shape)) for n, shape in enumerate(SHAPES)]
    weights[0] = ("w0", weights[0][1].t())  # not contiguous
    buffers = []

    def share(buffer):
        buffers.append(buffer)
        return {"gpu": (len(buffers),)}

    got = {}
    for parcel in parcels(weights, dtype, device="cpu", share=share, size=size):
        assert parcel["packed"] and set(parcel["dtype_names"]) == {str(dtype).removeprefix("torch.")}
        ((number,),) = pickle.loads(base64.b64decode(parcel["ipc_handles_pickled"])).values()
        held = buffers[number - 1][: sum(parcel["tensor_sizes"])].split(parcel["tensor_sizes"])
        for name, shape, data in zip(parcel["names"], parcel["shapes"], held, strict=True):
            got[name] = data.clone().view(dtype).view(shape)
        assert sum(parcel["tensor_sizes"]) <= buffers[number - 1].numel()
    assert list(got) == [name for name, _ in weights]
    assert all(torch.equal(got[name], tensor.to(dtype)) for name, tensor in weights)
    if size == 10_000:
        assert len(buffers) == 1
