"""Compute softmax over all keys by torch's own attention in blocks of queries, for heads that keep all keys."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from linearize.ops.heads import repeat_kv
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import accumulation_dtype

QUERIES_AT_ONCE = 256  # queries with a mask over all keys at a time


def full_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    scaling: float,
    softcap: float | None = None,
    layout: SequenceLayout,
    last_query: Int[Tensor, "#B G K"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """Return softmax of softcap * tanh(q.k * scaling / softcap) over the keys of a query's document up to its own.

    Takes O(K T) time and O(K) memory, forward and backward. Outputs are 0 for padding.

    Args:
        q, k, v: queries, keys and values after RoPE.
        scaling, softcap: of the scores.
        layout: of keys and queries.
        last_query: position of the last query that reads each key; None: every later query of its document reads it.
    """
    whole = k.shape[2] == layout.length
    if last_query is None:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if whole and layout.uniform and softcap is None:
            return scaled_dot_product_attention(q, k, v, is_causal=layout.length > 1, scale=scaling)
    position, document = layout.query_position, layout.query_document
    outputs = []
    for start in range(0, layout.length, QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        keys = slice(0, start + QUERIES_AT_ONCE if whole else None)  # later ones are not seen
        at, of = position[:, some, None], document[:, some, None]
        seen = (layout.key_position[:, None, keys] <= at) & (layout.key_position[:, None, keys] >= 0)
        seen &= layout.key_document[:, None, keys] == of
        padding = at < 0
        # Padding reads everything, which avoids a division by zero. Its output is replaced by 0 below.
        seen = (seen | padding)[:, None]
        if last_query is not None:
            seen = seen & (at[:, None] <= last_query[:, :, None, keys])
        block = q[:, :, some], k[:, :, keys], v[:, :, keys], seen, scaling, softcap
        attend = _attend if last_query is None else _attend_by_kv_head
        y = checkpoint(attend, *block, use_reentrant=False) if torch.is_grad_enabled() else attend(*block)
        assert isinstance(y, Tensor)
        outputs.append(y.masked_fill(padding[:, None], 0))
    return torch.cat(outputs, dim=2)


def _attend_by_kv_head(
    q: Tensor, k: Tensor, v: Tensor, seen: Bool[Tensor, "b G t K"], scaling: float, softcap: float | None
) -> Float[Tensor, "B H t D"]:
    """Return `_attend` with one mask per KV head, which its query heads share without a copy."""
    groups = k.shape[1]
    q, k, v = q.unflatten(1, (groups, -1)).flatten(0, 1), k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None]
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    seen = seen.expand(len(q) // groups, -1, -1, -1).flatten(0, 1)[:, None]
    return _attend(q, k, v, seen, scaling, softcap).unflatten(0, (-1, groups)).flatten(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Bool[Tensor, "b h t K"], scaling: float, softcap: float | None
) -> Float[Tensor, "B H t D"]:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
    dtype = accumulation_dtype(v.dtype)
    scores = softcap * torch.tanh(q.to(dtype) @ k.to(dtype).mT * (scaling / softcap))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.to(dtype)).to(v.dtype)
