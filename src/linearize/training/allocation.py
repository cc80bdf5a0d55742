"""Per-head KV budget allocation: divide a budget of bytes over KV heads, by how much recall needs each head.

Axes: G KV heads of a layer, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.base import Record
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import HeadwiseConfig, LayerPlan
from linearize.hf.teacher import TeacherShape
from linearize.training.memory import BLOCK, budget_bytes, head_bytes, head_mixer, largest, require_room

WINDOW = 2 * BLOCK  # with a cache: a query sees its own block and the one before
NEEDED = 0.4  # attention weight: pairs that receive less from every query of the repetition are not kept for recall
SMALLEST_RECALL = 48  # sizes of the cache for recall below this become 0


class Allocation(Record):
    """The memory of each KV head of the converted layers.

    Attributes:
        window, text: sizes of the window, and of the cache's part for text, in pairs; equal in all heads.
        recall: by layer, for each head, the size of the cache's part for recall, in pairs.
        needs: by layer [G][Q]: quantiles of the attention that recall gives to the head's pairs (`measure_attention`).
        budget, held: bytes of one sequence: at most, and as allocated.
    """

    window: int
    text: int
    recall: dict[int, list[int]]
    needs: dict[int, list[list[float]]]
    sinks: int
    budget: int
    held: int

    def plan(self, num_layers: int) -> LayerPlan:
        """Return the layer plan; layers that are not converted stay as they are."""
        return tuple(
            HeadwiseConfig.of([head_mixer(self.window, self.text, self.sinks, pairs) for pairs in self.recall[layer]])
            if layer in self.recall
            else None
            for layer in range(num_layers)
        )


def allocate(
    memory: MemoryConfig, needs: dict[int, list[list[float]]], teacher: TeacherShape, dtype: torch.dtype
) -> Allocation:
    """Divide the budget: a share for recall, by each head's needs, and the rest equally among all heads.

    Every head has a short window and a cache for text. If the budget is too small for caches, heads have only a window.

    Raises:
        UserError: the budget is less than the smallest window in every head takes.
    """
    require_room(memory, teacher, len(needs), dtype)
    budget, layers = budget_bytes(memory, teacher, dtype), sorted(needs)
    quantiles = [torch.tensor(needs[layer]) for layer in layers]
    room = max(0, memory.reference_length - memory.sinks - WINDOW)

    def held(window: int, text: int, recall: list[list[int]]) -> int:
        mixers = (head_mixer(window, text, memory.sinks, pairs) for of_layer in recall for pairs in of_layer)
        return sum(head_bytes(mixer, teacher, dtype) for mixer in mixers)

    def recall(pairs: int) -> list[list[int]]:
        return cache_sizes(quantiles, room, pairs, multiple=BLOCK, least=SMALLEST_RECALL)

    none = [[0] * len(of_layer) for of_layer in quantiles]
    least, share = held(WINDOW, 1, none), memory.recall_fraction * budget
    pairs = largest(lambda n: held(WINDOW, 1, recall(n)) - least <= share, room * sum(map(len, quantiles)))
    chosen = recall(pairs)
    window, text = WINDOW, largest(lambda n: held(WINDOW, n, chosen) <= budget, room) if least <= budget else 0
    if not text:  # no bytes for a cache in every head
        chosen = none
        window = largest(lambda n: held(n, 0, none) <= budget, memory.reference_length)
    return Allocation(
        window=window,
        text=text,
        recall=dict(zip(layers, chosen, strict=True)),
        needs=needs,
        sinks=memory.sinks,
        budget=budget,
        held=held(window, text, chosen),
    )


def cache_sizes(
    needs: Sequence[Float[Tensor, "G Q"]], room: int, pairs: int, *, multiple: int, least: int
) -> list[list[int]]:
    """Return the size of each KV head's cache for recall: the number of its pairs whose need exceeds a threshold.

    All heads have the same threshold, so that all sizes sum to at most `pairs`. This evicts the pairs with the least
    attention, except that sizes below `least` become 0. Pairs with needs below the log of NEEDED are never kept. Pairs
    with needs equal to the threshold are divided among their heads in proportion.

    Args:
        needs: by layer, quantiles of the log of the largest attention weight that recall gives to a pair.
        room: the number of pairs of a head, of which quantiles give the share; also the most pairs of a cache.
        pairs: the most pairs of all caches together.
        multiple: sizes are multiples of it.
        least: the smallest size other than 0.
    """

    def shares(threshold: float) -> list[Float[Tensor, " G"]]:
        return [(of_layer > threshold).float().mean(1) for of_layer in needs]

    def sizes(of_layers: list[Float[Tensor, " G"]]) -> list[list[int]]:
        rounded = [[round(share * room / multiple) * multiple for share in of_heads.tolist()] for of_heads in of_layers]
        return [[size if size >= least else 0 for size in of_heads] for of_heads in rounded]

    def too_many(of_layers: list[Float[Tensor, " G"]]) -> bool:
        return sum(map(sum, sizes(of_layers))) > pairs

    most = shares(math.log(NEEDED))
    if not too_many(most):
        return sizes(most)
    low, high = math.log(NEEDED), 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if too_many(shares(middle)) else (low, middle)
    fewer, more = shares(high), shares(low)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        mixed = [a.lerp(b, middle) for a, b in zip(fewer, more, strict=True)]
        low, high = (low, middle) if too_many(mixed) else (middle, high)
    return sizes([a.lerp(b, low) for a, b in zip(fewer, more, strict=True)])
