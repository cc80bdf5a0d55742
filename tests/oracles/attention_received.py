"""A cache of the pairs that received the most attention, one query after the other.

Written from the definition alone: every query's softmax weights, of all query heads of the KV head, are added to the
sums of the pairs that it reads. When a block begins, the pairs with the largest sums stay; then all sums are multiplied
by `keeps`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    width: int,
    blocks: int,
    sinks: int,
    size: int,
    keeps: float,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Outputs [r, T, D] of the query heads of one KV head, one document; and what each query's cache holds."""
    length, cache, sums, held = q.shape[1], list[int](), [0.0] * q.shape[1], []
    y = torch.zeros_like(q)
    for n in range(length):
        if n % width == 0:
            left = n - blocks * width
            if left >= 0:
                candidates = cache + [j for j in range(left, left + width) if j >= sinks]
                ranked = sorted(candidates, key=lambda j: (-sums[j], j))
                cache = sorted(ranked[:size])
            sums = [keeps * x for x in sums]
        low = width * max(0, n // width - blocks + 1)
        seen = sorted({*range(low, n + 1), *cache, *range(min(sinks, n + 1))})
        for head in range(len(q)):
            logits = torch.stack([q[head, n] @ k[j] * scaling for j in seen])
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            weights = logits.softmax(0)
            y[head, n] = weights @ v[seen]
            for j, weight in zip(seen, weights.tolist(), strict=True):
                sums[j] += weight
        held.append(list(cache))
    return y, held
