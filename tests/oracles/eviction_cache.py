"""Softmax over a terraced window, its sinks and a KV cache with eviction, one query at a time.

Written from the definition alone: when a block of queries begins, the block of keys that leaves the window and the
cache are candidates, and those with the `size` highest scores stay; the older of equals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def scores(weight: Tensor, recency: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eviction scores [T] of one head: linear in key before RoPE, value, both log lengths, and the position."""
    found = []
    for n, (key, value) in enumerate(zip(k, v, strict=True)):
        of_key, of_key_length, of_value, of_value_length = weight.split([len(key), 1, len(value), 1])
        lengths = of_key_length * key.square().sum().sqrt().log() + of_value_length * value.square().sum().sqrt().log()
        found.append(of_key @ key + of_value @ value + lengths[0] + recency * n)
    return torch.stack(found)


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


def remember(length: int, *, width: int, blocks: int, sinks: int, size: int, scores: Tensor) -> Memory:
    """The choice, block by block."""
    cache: list[int] = []
    memory = Memory([], [], {})
    for n in range(length):
        if n % width == 0 and n >= blocks * width:
            left = n - blocks * width
            leave = [j for j in range(left, left + width) if j >= sinks]
            candidates = cache + leave
            ranked = sorted(candidates, key=lambda j: (-float(scores[j]), j))
            kept = sorted(ranked[:size])
            thrown = [j for j in cache if j not in kept]
            for j in leave:
                if j not in kept:
                    memory.place[j] = j
                elif thrown:
                    memory.place[thrown.pop(0)] = j
            assert not thrown
            cache = kept
        memory.held.append(list(cache))
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
) -> tuple[Tensor, list[list[int]]]:
    """Outputs [T, D] of one head of one document, and what the cache holds for each query."""
    held = remember(len(q), width=width, blocks=blocks, sinks=sinks, size=size, scores=scores).held
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
