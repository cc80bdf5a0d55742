"""Softmax over all keys, for heads that keep them all: torch's own attention, by blocks of queries."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from linearize.ops.heads import repeat_kv
from linearize.ops.layout import Layout
from linearize.ops.partial import accumulation_dtype

QUERIES_AT_ONCE = 256  # of which a mask over all keys exists


def full_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    scaling: float,
    softcap: float | None = None,
    layout: Layout,
) -> Float[Tensor, "B H T D"]:
    """Softmax of softcap * tanh(q.k * scaling / softcap) over the keys of a query's document up to its own; in O(K T)
    time and O(K) memory, forward and backward. 0 for padding.

    A query that is not padding always sees a key: its own.
    """
    heads, length = q.shape[1], layout.length
    k, v = repeat_kv(k, heads), repeat_kv(v, heads)
    if layout.uniform and softcap is None and k.shape[2] == length:
        return scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scaling)
    position, document = layout.query_position, layout.query_document
    outputs = []
    for start in range(0, length, QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        at, of = position[:, some, None], document[:, some, None]
        seen = (layout.key_position[:, None] <= at) & (layout.key_position[:, None] >= 0)
        seen &= layout.key_document[:, None] == of
        padding = at < 0
        # Padding reads everything, so that nothing is divided by zero, and counts for nothing.
        block = q[:, :, some], k, v, (seen | padding)[:, None], scaling, softcap
        y = checkpoint(_attend, *block, use_reentrant=False) if torch.is_grad_enabled() else _attend(*block)
        assert isinstance(y, Tensor)
        outputs.append(y.masked_fill(padding[:, None], 0))
    return torch.cat(outputs, dim=2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Bool[Tensor, "b 1 t K"], scaling: float, softcap: float | None
) -> Float[Tensor, "B H t D"]:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
    dtype = accumulation_dtype(v.dtype)
    scores = softcap * torch.tanh(q.to(dtype) @ k.to(dtype).mT * (scaling / softcap))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.to(dtype)).to(v.dtype)
