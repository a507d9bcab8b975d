"""Whole tensors of what FSDP2 shards over the ranks, and shards of whole ones. Nothing is copied where there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def settle(module: torch.nn.Module) -> None:
    """Let a module's parameters be the trained ones again: after a pass without a backward pass, FSDP2 leaves gathered
    copies of the outermost ones in their place, in the type that was computed in."""
    if isinstance(module, FSDPModule):
        module.reshard()


def abandon(module: torch.nn.Module) -> None:
    """Drop what a pass that failed half way has left, its gradients and the state that FSDP2 was in: this does what
    torch does at the end of a backward pass. Else the next one would find modules in the middle of theirs."""
    module.zero_grad()  # also of gathered parameters, which would be reduced otherwise
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._root_post_backward_final_callback()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Every rank has to call this, as the shards are gathered."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`value`, all of a tensor, sharded and placed as `tensor` is."""
    value = value.to(tensor.device, tensor.dtype)
    if not isinstance(tensor, DTensor):
        return value
    if tensor.device_mesh.size() == 1:
        return DTensor.from_local(value, tensor.device_mesh, tensor.placements)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors, in host memory."""
    state = optimizer.state_dict()
    held = {
        number: {name: whole(v).cpu() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": held}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take a state that `optimizer_state` gave."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {
        number: {
            name: like(v, parameters[number]) if isinstance(v, torch.Tensor) and v.dim() else v
            for name, v in values.items()
        }
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": held})
