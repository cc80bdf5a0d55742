"""Write repeated spans of tokens into text, far apart, for learning or measuring recall.

Ordinary text rarely needs tokens from far back, which models with less memory lose first. Here the second of two equal
spans can be predicted only from the first; spans are words or random tokens.

Axes: N rows, L tokens per row, P pairs of spans in a row, S tokens in a slot, V ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from linearize.data.rows import IGNORED, PackedRows

SLOT = 64  # tokens: a row is divided into slots; the two copies of a span are in two of them
SHORTEST = 8  # tokens of a span; the longest fills three quarters of its slot


def ordinary_tokens(vocab_size: int, special: Collection[int]) -> Int[Tensor, " V"]:
    """Return the token ids below `vocab_size` that are not special."""
    excluded = set(special)
    return torch.tensor([token for token in range(vocab_size) if token not in excluded])


def with_repeats(rows: PackedRows, share: float, vocabulary: Int[Tensor, " V"], *, seed: int) -> PackedRows:
    """Return the rows with pairs of equal spans written over the text of a `share` of them, as many as fit.

    Every second pair of a row has random tokens, the others text from another row. A changed row is one document. First
    copies, and the first token of second copies, which cannot be predicted, have no loss.
    """
    slots = rows.input_ids.shape[1] // SLOT
    pairs, longest = slots // 2, SLOT * 3 // 4
    generator = torch.Generator().manual_seed(seed)
    chosen = _chosen(len(rows), share, generator)
    if not len(chosen) or not pairs:
        return rows

    def drawn(high: int, *shape: int) -> Int64[Tensor, ...]:
        return torch.randint(high, (len(chosen), *shape), generator=generator)

    inside = torch.arange(longest)
    lengths = SHORTEST + drawn(longest + 1 - SHORTEST, pairs, 1)
    # The slots of each pair in the order of the text, and the start of the span in each slot.
    order = torch.rand(len(chosen), slots, generator=generator).argsort(1)[:, : 2 * pairs]
    starts = SLOT * order.view(len(chosen), pairs, 2).sort(-1).values + drawn(SLOT - longest, pairs, 2)
    owners, begins = drawn(len(rows), pairs, 1), drawn(rows.input_ids.shape[1] - longest, pairs, 1)
    spans = rows.input_ids[owners, begins + inside]
    spans[:, ::2] = vocabulary[drawn(len(vocabulary), *spans[:, ::2].shape[1:])]

    input_ids, labels = rows.input_ids.clone(), rows.labels.clone()
    learned = spans.clone()
    learned[:, :, 0] = IGNORED
    written = (inside < lengths).expand_as(spans)
    row = chosen[:, None, None].expand_as(spans)[written]
    for copy, its in enumerate((torch.full_like(spans, IGNORED), learned)):
        place = (starts[:, :, copy, None] + inside)[written]
        input_ids[row, place], labels[row, place] = spans[written], its[written]
    positions = torch.arange(rows.input_ids.shape[1]).expand(len(chosen), -1)
    position_ids = rows.position_ids.index_copy(0, chosen, positions)
    return PackedRows(input_ids, position_ids, labels, first_document=rows.first_document)


def without_repeats(rows: PackedRows, share: float, *, seed: int) -> PackedRows:
    """Return the rows that `with_repeats` left unchanged for this share and seed; all rows if there are none."""
    plain = torch.ones(len(rows), dtype=torch.bool)
    plain[_chosen(len(rows), share, torch.Generator().manual_seed(seed))] = False
    return rows if plain.all() or not plain.any() else rows.rows(plain.nonzero()[:, 0])


def _chosen(count: int, share: float, generator: torch.Generator) -> Int[Tensor, " n"]:
    return torch.randperm(count, generator=generator)[: round(share * count)].sort().values
