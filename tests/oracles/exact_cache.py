"""Softmax over a terraced window, its sinks and a bounded cache of exact keys, one query at a time.

Written from the definition alone: when a block of queries begins, the block of keys that leaves the window and the
cache are candidates, and the `size` best stay; the first of equals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Worth = Callable[[list[int], int], float]


def redundancy(k: Tensor) -> Worth:
    """Minus the cosine with the newer candidate that is most alike; of the newest, 1."""

    def worth(candidates: list[int], key: int) -> float:
        cosines = [float(k[key] @ k[other] / (k[key].norm() * k[other].norm())) for other in candidates if other > key]
        return -max(cosines, default=-1.0)

    return worth


def redundancy_and_age(k: Tensor) -> Worth:
    """`redundancy` less 0.4 for each doubling of the age, which is 1 for the newest candidate."""

    def worth(candidates: list[int], key: int) -> float:
        return redundancy(k)(candidates, key) - 0.4 * math.log2(max(candidates) - key + 1)

    return worth


def self_recall(k: Tensor, v: Tensor) -> Worth:
    """log2 of how far the value is from what softmax over the other candidates, of 8 cosines, makes of its key."""

    def worth(candidates: list[int], key: int) -> float:
        others = [other for other in candidates if other != key]
        if not others:
            return math.log2(float(v[key].norm()))
        cosines = torch.stack([k[key] @ k[other] / (k[key].norm() * k[other].norm()) for other in others])
        return math.log2(float((v[key] - (8 * cosines).softmax(0) @ v[others]).norm()))

    return worth


def recall_redundancy_and_age(k: Tensor, v: Tensor) -> Worth:
    """Both errors, less 0.2 for each doubling of the age."""

    def worth(candidates: list[int], key: int) -> float:
        age = 0.2 * math.log2(max(candidates) - key + 1)
        return self_recall(k, v)(candidates, key) + redundancy(k)(candidates, key) - age

    return worth


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


def remember(length: int, *, width: int, blocks: int, sinks: int, size: int, worth: Worth) -> Memory:
    """The choice, block by block."""
    cache: list[int] = []
    memory = Memory([], [], {})
    for n in range(length):
        if n % width == 0 and n >= blocks * width:
            left = n - blocks * width
            leave = [j for j in range(left, left + width) if j >= sinks]
            candidates = cache + leave
            scores = {j: worth(candidates, j) for j in candidates}
            ranked = sorted(candidates, key=lambda j: (-scores[j], candidates.index(j)))
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
    worth: Worth,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Outputs [T, D] of one head of one document, and what the cache holds for each query."""
    held = remember(len(q), width=width, blocks=blocks, sinks=sinks, size=size, worth=worth).held
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
