"""What a forward and backward pass holds besides weights and their gradients, from the model's sizes.

Counted from what autograd keeps of the layers as `transformers` 5 computes them, operation by operation (after
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, whose layer is
another). b: bytes of a number in the pass (2 or 4); h: hidden size; m: width of the feed-forward part; q and kv: query
and key sizes, heads times head size. Per token:

    norm and the input that it makes   (4 + 2 b) h   input in fp32, normalised, times the weight; a wide norm (8 + b) h
    softmax attention                  b (2 q + 2 kv) + 4 heads    query, output; key, value; sums of the softmax
      with a mask                      kv becomes q: keys and values are repeated for every query head
      with norms of query and key      (4 + b) (q + kv), wide 8 (q + kv)
      with a gate                      3 b q
    feed-forward part                  4 b m         gate, its SiLU, up, their product

Linear attention is counted as `transformers` computes it without the package flash-linear-attention (chunks of 64 in
fp32, a triangular solve row by row): its factors were fitted to what autograd kept, not derived.
Tests compare all of it with what torch keeps, and the peaks with those of a tracked pass.
"""

from __future__ import annotations

from aglite.memory_plan.shape import FP32, Kind, Shape

LOGIT_ARRAYS = 5
"""Arrays of a logit's size in fp32 at the peak of the backward pass: the logits, and of their gradient that of the
normaliser (three on the way to it) and that of the chosen entries. Before them there are the logits as the head made
them."""


def layer_bytes(shape: Shape, kind: Kind, width: int, *, masked: bool) -> int:
    """What autograd keeps of one layer for one token; `masked`: attention with an explicit mask."""
    inner = _attention(shape, width, masked) if kind == "full_attention" else _linear_attention(shape, width)
    return 2 * _norm(shape, width) + 4 * width * shape.mlp + inner


def _norm(shape: Shape, width: int) -> int:
    return ((8 + width) if shape.wide_norm else (4 + 2 * width)) * shape.hidden + FP32


def _attention(shape: Shape, width: int, masked: bool) -> int:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = width * (2 * query + 2 * (query if masked else key)) + FP32 * shape.heads
    if shape.qk_norm:
        kept += (8 if shape.wide_norm else 4 + width) * (query + key) + FP32 * (shape.heads + shape.kv_heads)
    return kept + (3 * width * query if shape.gated else 0)


def _linear_attention(shape: Shape, width: int) -> int:
    of_keys = (29.5 + 2 * width) * shape.linear_heads * shape.linear_key_dim
    of_values = (25 + 3 * width) * shape.linear_values
    return round(2 * width * shape.linear_channels + of_keys + of_values + (7000 + 3 * width) * shape.linear_heads)


def pass_bytes(
    shape: Shape, tokens: int, logits: int, width: int, *, checkpointing: bool = False, masked: bool = False
) -> int:
    """The most that a pass over one micro-batch of `tokens`, `logits` of which are predicted from, holds at once.

    It is reached either at the logits, with all that was kept of the layers, or in the backward pass of a layer, with
    what it makes on the way: the gradient of its largest matrix and three arrays of the feed-forward part's width. With
    checkpointing only the inputs of the layers are kept, and one layer at a time is computed again. A mask costs
    tokens squared in every layer with softmax attention, which makes numbers of it, `width` bytes each.
    """
    kept = {}
    for layer in shape.layers:
        if layer.kind not in kept:
            kept[layer.kind] = tokens * layer_bytes(shape, layer.kind, width, masked=masked)
            if masked and layer.kind == "full_attention":
                kept[layer.kind] += tokens * tokens * width
    at_logits = (LOGIT_ARRAYS * FP32 + width) * shape.vocabulary * logits
    on_the_way = width * (shape.hidden * shape.mlp + 3 * tokens * shape.mlp)
    last_norm = tokens * _norm(shape, width)
    if not checkpointing:
        whole = sum(shape.count(kind) * size for kind, size in kept.items())
        return last_norm + whole + max(at_logits, on_the_way)
    inputs = width * shape.hidden * tokens * len(shape.layers)
    return last_norm + inputs + max(at_logits, on_the_way + max(kept.values()))
