"""Shared heads: grouped-query attention has fewer heads of keys and values than of queries."""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor


def repeat_kv(x: Shaped[Tensor, "B h K X"], heads: int) -> Shaped[Tensor, "B H K X"]:
    """Repeat each head for the heads that share it: KV heads for query heads (GQA), values for heads of keys."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
