"""The forward pass, on rows that belong to any number of sequences."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from aglite.engine.embedded.architecture import Architecture
from aglite.engine.embedded.linear import Linear, can_pack


class Attention(Protocol):
    """How the rows of one step attend. Made for each step; knows where keys and values are kept."""

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """query [rows, groups, kv_heads, head_dim], already scaled; key_value [rows, 2 * kv_heads, head_dim], the keys
        first. Returns [rows, heads * head_dim] in the order of `query`."""
        ...


class Layer:
    __slots__ = ("down", "gate_up", "out", "qk_scale", "qkv")

    def __init__(self, packed: bool) -> None:
        self.qkv, self.out, self.gate_up, self.down = (Linear(packed) for _ in range(4))
        self.qk_scale: torch.Tensor | None = None  # [heads + kv_heads, head_dim] of Qwen3's query and key norms


class Model:
    """Weights in the fused form of `weights.py` and the computation on them, in float32."""

    def __init__(
        self, arch: Architecture, device: torch.device, context_length: int, packed: bool | None = None
    ) -> None:
        self.arch = arch
        self.device = device
        self.packed = can_pack(device) if packed is None else packed
        self.layers = [Layer(self.packed) for _ in range(arch.layers)]
        self.head = Linear(self.packed)
        self.embedding = torch.empty(arch.vocab, arch.hidden, device=device)
        self.rotations = arch.rotations(context_length).to(device)
        # RMSNorm is x * sqrt(n) / sqrt(|x|^2 + n * eps); the factor sqrt(n) is in the weights, the root is a hypot.
        self._norm_floor = torch.tensor(math.sqrt(arch.hidden * arch.eps), device=device)
        self._head_norm_floor = torch.tensor(math.sqrt(arch.head_dim * arch.eps), device=device)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        """ids and positions [rows] -> final hidden states [rows, hidden]; the norm's weight is in head."""
        arch = self.arch
        rotated = arch.heads + arch.kv_heads
        rows = len(ids)
        rotations = self.rotations[positions].unsqueeze(1)
        x = self.embedding[ids]
        # oneDNN streams packed weights nearly twice as fast for two rows as for one.
        doubled = self.packed and rows == 1
        if doubled:
            x = x.expand(2, -1).contiguous()
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normalise(x)).view(-1, rotated + arch.kv_heads, arch.head_dim)
            if doubled:
                qkv = qkv[:1]
            turning = qkv[:, :rotated]
            if layer.qk_scale is not None:
                norm = torch.linalg.vector_norm(turning, dim=-1, keepdim=True)
                turning.div_(torch.hypot(norm, self._head_norm_floor)).mul_(layer.qk_scale)
            torch.view_as_complex(turning.view(rows, rotated, -1, 2)).mul_(rotations)
            query = qkv[:, : arch.heads].view(rows, arch.groups, arch.kv_heads, arch.head_dim)
            mixed = attend(number, query, qkv[:, arch.heads :])
            if doubled:
                mixed = torch.cat((mixed, mixed))
            x = layer.out.plus(mixed, x)
            gate, up = layer.gate_up(self._normalise(x)).chunk(2, 1)
            x = layer.down.plus(F.silu(gate, inplace=True) * up, x)
        return self._normalise(x)[:rows]

    def logits(self, hidden: torch.Tensor, inverse_temperature: torch.Tensor | None = None) -> torch.Tensor:
        """Final hidden states [rows, hidden] -> logits / temperature [rows, vocab]; inverse_temperature [rows, 1]."""
        if inverse_temperature is not None:
            hidden = hidden * inverse_temperature
        if self.packed and len(hidden) == 1:
            return self.head(hidden.expand(2, -1).contiguous())[:1]
        return self.head(hidden)

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(norm, self._norm_floor)
