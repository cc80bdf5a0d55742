"""Per-head KV budget allocation: divide a budget of bytes over KV heads, by what recall needs of each.

Axes: G KV heads of a layer, Q quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from linearize.base import UserError
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import HeadwiseConfig, LayerPlan
from linearize.training.eviction_scores import cache_sizes
from linearize.training.memory import BLOCK, MemoryConfig, head_bytes, head_mixer

WINDOW = 2 * BLOCK  # beside a cache: a query sees its own block and the one before
SMALLEST_RECALL = 3 * BLOCK  # a smaller cache for recall is none


@dataclass(frozen=True)
class Allocation:
    """The window and the size of the KV cache with eviction of each KV head of the layers that are converted.

    Attributes:
        windows, caches: by layer, of each head; in pairs.
        recall_heads: by layer, whether each head's cache serves recall; the others' caches serve text.
        needs: by layer [G][Q]: what recall needs of the head's pairs (`measure_attention`).
        budget, held: bytes of one sequence: at most, and as allocated.
    """

    windows: dict[int, list[int]]
    caches: dict[int, list[int]]
    recall_heads: dict[int, list[bool]]
    needs: dict[int, list[list[float]]]
    sinks: int
    budget: int
    held: int

    @classmethod
    def of(cls, data: dict[str, Any]) -> Allocation:
        """Return the allocation that JSON data, whose keys are strings, says."""
        found = dict(data)
        for name in ("windows", "caches", "recall_heads", "needs"):
            found[name] = {int(layer): heads for layer, heads in data[name].items()}
        return cls(**found)

    def plan(self, num_layers: int) -> LayerPlan:
        """Return the layer plan; layers that are not converted stay as they are."""
        return tuple(
            HeadwiseConfig.of(
                [head_mixer(w, c, self.sinks) for w, c in zip(self.windows[layer], self.caches[layer], strict=True)]
            )
            if layer in self.windows
            else None
            for layer in range(num_layers)
        )


def allocate(
    memory: MemoryConfig, needs: dict[int, list[list[float]]], teacher: TeacherShape, dtype: torch.dtype
) -> Allocation:
    """Divide the budget: caches for the heads that recall needs, of as many pairs as it needs; the rest to all others.

    Heads that recall needs little have a short window and a cache for text, all of the same size; where there are
    bytes for none, a window alone.

    Raises:
        UserError: the budget is less than the smallest window in every head takes.
    """
    budget, layers = memory.budget(teacher, dtype), sorted(needs)
    quantiles = [torch.tensor(needs[layer]) for layer in layers]
    room = max(0, memory.reference_length - memory.sinks - WINDOW)

    def size(window: int, cache: int) -> int:
        return head_bytes(head_mixer(window, cache, memory.sinks), teacher, dtype)

    def recall(pairs: int) -> list[list[int]]:
        return cache_sizes(quantiles, room, pairs, multiple=BLOCK, least=SMALLEST_RECALL)

    def recall_bytes(sizes: list[list[int]]) -> int:
        return sum(size(WINDOW, cache) for of_layer in sizes for cache in of_layer if cache)

    low, high = 0, room * sum(map(len, quantiles))
    while low < high:  # the largest caches for recall that fit
        pairs = (low + high + 1) // 2
        fits = recall_bytes(recall(pairs)) <= memory.recall_fraction * budget
        low, high = (pairs, high) if fits else (low, pairs - 1)
    sizes = recall(low)
    others = sum(not cache for of_layer in sizes for cache in of_layer)
    window, cache = _of_others((budget - recall_bytes(sizes)) // max(1, others), memory.sinks, size)
    if not window:
        least = recall_bytes(sizes) + others * size(1, 0)
        raise UserError(
            f"memory: expected at least {least:,} bytes, with which every KV head has its sinks and its own key, found "
            f"{budget:,}; give more, or fewer memory.sinks"
        )
    pairs_of = {
        layer: [(WINDOW, found, True) if found else (window, cache, False) for found in of_layer]
        for layer, of_layer in zip(layers, sizes, strict=True)
    }
    return Allocation(
        windows={layer: [w for w, _, _ in heads] for layer, heads in pairs_of.items()},
        caches={layer: [c for _, c, _ in heads] for layer, heads in pairs_of.items()},
        recall_heads={layer: [recalls for _, _, recalls in heads] for layer, heads in pairs_of.items()},
        needs=needs,
        sinks=memory.sinks,
        budget=budget,
        held=sum(size(w, c) for heads in pairs_of.values() for w, c, _ in heads),
    )


def _of_others(each: int, sinks: int, size: Any) -> tuple[int, int]:
    """Return window and cache of a head in `each` bytes; a window alone where there are bytes for no cache."""
    if size(WINDOW, 1) > each:
        window = each // (size(2, 0) - size(1, 0)) - sinks
        return max(0, window), 0
    one = size(WINDOW, 2) - size(WINDOW, 1)
    return WINDOW, 1 + (each - size(WINDOW, 1)) // one
