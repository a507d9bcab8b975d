"""The most that a step's pass holds under FSDP2 in mixed precision, by torch's own count: nothing is computed.

`python fsdp_peak.py CASES` takes (configuration, tokens, logits, gradient checkpointing) of each case as JSON
and prints bytes. In a process of its own, since it makes itself a world of one rank that does not exist.
"""

import json
import sys

import torch
import torch.distributed as dist
from memory_passes import inputs, losses, model_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets


def peak(config: dict, tokens: int, logits: int, checkpointing: bool) -> int:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": policy, "reshard_after_forward": True}
    with FakeTensorMode():
        model = model_of(config, torch.float32, checkpointing)
        for module in _select_fsdp2_wrap_targets(model, list(model._no_split_modules)):  # as verl wraps it
            fully_shard(module, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tracker = FSDPMemTracker(model, optimizer)
        given = inputs(tokens, logits, True)
        losses(model, given).backward()
        optimizer.step()  # gradients and moments are there from now on
        tracker.track_inputs((given["input_ids"],))
        with tracker:
            losses(model, given).backward()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    print(json.dumps([peak(*case) for case in json.loads(sys.argv[1])]))
