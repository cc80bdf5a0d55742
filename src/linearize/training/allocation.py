"""Per-head KV budget allocation: divide a budget of bytes over KV heads, by what recall needs of each.

Axes: G KV heads of a layer, Q quantiles.
"""

from __future__ import annotations

import torch

from linearize.base import Record
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import HeadwiseConfig, LayerPlan
from linearize.hf.teacher import TeacherShape
from linearize.training.eviction_scores import cache_sizes
from linearize.training.memory import BLOCK, budget_bytes, head_bytes, head_mixer, largest, require_room

WINDOW = 2 * BLOCK  # beside a cache: a query sees its own block and the one before
SMALLEST_RECALL = 48  # fewer pairs for recall are none


class Allocation(Record):
    """The memory of each KV head of the converted layers.

    Attributes:
        window, text: pairs of the window, and of the cache with the highest scores for text; alike in all heads.
        recall: by layer, of each head, pairs of the cache with the highest scores for recall.
        needs: by layer [G][Q]: what recall needs of the head's pairs (`measure_attention`).
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
    """Divide the budget: a share for what recall needs of each head, and the rest alike among all heads.

    Every head has a short window and a cache for text; where there are bytes for none, a window alone.

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
