"""Softmax over a terraced window, its sinks and a KV cache with eviction, one query at a time.

Written from the definition alone: when a block of queries begins, the block of keys that leaves the window and the
cache are candidates, and those with the `size` highest scores stay; the older of equals. Where the cache has two parts,
the first takes `recall_size` by its scores, the second the rest, by its own, of what the first leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def scores(weight: Tensor, recency: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eviction scores [S, T] of one head: linear in key before RoPE, value, both log lengths, and the position."""
    found = []
    for its, fading in zip(weight, recency, strict=True):
        of_key, of_key_length, of_value, of_value_length = its.split([k.shape[1], 1, v.shape[1], 1])
        for n, (key, value) in enumerate(zip(k, v, strict=True)):
            lengths = of_key_length * key.square().sum().sqrt().log()
            lengths = lengths + of_value_length * value.square().sum().sqrt().log()
            found.append(of_key @ key + of_value @ value + lengths[0] + fading * n)
    return torch.stack(found).view(len(weight), len(k))


@dataclass(frozen=True)
class Memory:
    """What becomes of one head's keys, all that a query sees being its window, the sinks, `held` and `dropped`.

    Attributes:
        held: for each query, what the cache holds.
        dropped: for each query, what the cache has dropped.
        place: of a key that was dropped, the position that it is written to the linear state for: its own, if it is
            dropped when it leaves the window; if it is thrown out later, that of the key which the cache took instead.
    """

    held: list[list[int]]
    dropped: list[list[int]]
    place: dict[int, int]


def remember(
    length: int, *, width: int, blocks: int, sinks: int, size: int, scores: Tensor, recall_size: int = 0
) -> Memory:
    """The choice, block by block, by scores [S, T], one row for each part."""
    sizes = [recall_size, size - recall_size] if recall_size else [size]
    parts: list[list[int]] = [[] for _ in sizes]
    memory = Memory([], [], {})
    for n in range(length):
        if n % width == 0 and n >= blocks * width:
            left = n - blocks * width
            leave = [j for j in range(left, left + width) if j >= sinks]
            offered = {j: j for j in leave}  # what is offered in the place of a key that leaves
            for part, number, row in zip(range(len(sizes)), sizes, scores, strict=True):
                candidates = parts[part] + list(offered.values())
                ranked = sorted(candidates, key=lambda j: (-float(row[j]), j))
                kept = sorted(ranked[:number])
                thrown = [j for j in parts[part] if j not in kept]
                for place, j in list(offered.items()):
                    if j not in kept:
                        continue
                    if thrown:
                        offered[place] = thrown.pop(0)
                    else:
                        del offered[place]
                assert not thrown
                parts[part] = kept
            memory.place.update({j: place for place, j in offered.items()})
        memory.held.append(sorted(j for part in parts for j in part))
        memory.dropped.append(sorted(memory.place))
    return memory


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    width: int,
    blocks: int,
    sinks: int,
    size: int,
    scores: Tensor,
    scaling: float,
    softcap: float | None = None,
    recall_size: int = 0,
) -> tuple[Tensor, list[list[int]]]:
    """Outputs [T, D] of one head of one document, and what the cache holds for each query."""
    how = dict(width=width, blocks=blocks, sinks=sinks, size=size, recall_size=recall_size)
    held = remember(len(q), scores=scores, **how).held
    outputs = []
    for n in range(len(q)):
        low = width * max(0, n // width - blocks + 1)
        seen = sorted({*range(low, n + 1), *held[n], *range(min(sinks, n + 1))})
        logits = torch.stack([q[n] @ k[j] * scaling for j in seen])
        weights = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).exp()
        outputs.append(sum(weight * v[j] for weight, j in zip(weights, seen, strict=True)) / weights.sum())
    assert all(bool(y.isfinite().all()) for y in outputs)
    return torch.stack(outputs), held


Combined = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Logits of exact keys [N], their values [N,D], weights of the dropped [M] and their values [M,D] as an output [D]."""


def attention_with_dropped(
    q: Tensor, k: Tensor, v: Tensor, *, weight: Callable[[int, int], Tensor], combined: Combined, **how: Any
) -> tuple[Tensor, Memory]:
    """Outputs [T, D] where a query n reads each key j that was dropped by `weight(n, j)`; `how` as in `attention`."""
    scaling, width, blocks, sinks = how.pop("scaling"), how["width"], how["blocks"], how["sinks"]
    memory, outputs = remember(len(q), **how), []
    for n in range(len(q)):
        low = width * max(0, n // width - blocks + 1)
        seen = sorted({*range(low, n + 1), *memory.held[n], *range(min(sinks, n + 1))})
        assert sorted([*seen, *memory.dropped[n]]) == list(range(n + 1)), "every key is exact or dropped, and once"
        logits = torch.stack([q[n] @ k[j] * scaling for j in seen])
        dropped = memory.dropped[n]
        weights = torch.stack([weight(n, j) for j in dropped]) if dropped else logits.new_zeros(0)
        outputs.append(combined(logits, v[seen], weights, v[dropped]))
    return torch.stack(outputs), memory
