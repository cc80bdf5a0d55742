"""Measure copying: the gain in loss when random tokens repeat at a distance beyond the window.

Axes: N rows, L tokens of a row, V ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from linearize.data.rows import IGNORED, PackedRows
from linearize.evaluation.intervals import Interval, Totals, intervals, paired_interval
from linearize.evaluation.perplexity import token_losses


@dataclass(frozen=True)
class CopyRows(PackedRows):
    """Rows of `length` random tokens, random filler, and the same tokens again, `distance` tokens after their start.

    Only both copies have labels, without the first token of each, which cannot be predicted.
    """

    length: int
    distance: int


@dataclass(frozen=True)
class Copying:
    """One model's loss on either copy, nats per token, and gain = first - second."""

    first: Interval
    second: Interval
    gain: Interval

    @classmethod
    def of(cls, losses: Sequence[Totals], *, samples: int = 1000, seed: int = 0) -> Copying:
        first, second = intervals(losses, samples=samples, seed=seed)
        return cls(first, second, gain=paired_interval(*losses, samples=samples, seed=seed))


def copy_rows(
    vocabulary: Int[Tensor, " V"], *, window_size: int, max_positions: int, rows: int, seed: int
) -> CopyRows | None:
    """Return independent rows of tokens drawn uniformly from `vocabulary`, with a distance of two windows.

    None: not even two tokens at this distance fit the model's positions.
    """
    distance = 2 * window_size
    length = min(window_size, max_positions - distance)
    if length < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = vocabulary.cpu()[torch.randint(len(vocabulary), (rows, distance), generator=generator)]
    input_ids = torch.cat([drawn, drawn[:, :length]], dim=1)
    labels = input_ids.clone()
    labels[:, length : distance + 1] = IGNORED
    labels[:, 0] = IGNORED
    position_ids = torch.arange(distance + length).expand(rows, -1).contiguous()
    return CopyRows(input_ids, position_ids, labels, length, distance)


def copy_losses(model: nn.Module, rows: CopyRows, *, batch_size: int) -> list[Totals]:
    """Return the mean loss of each row over the first copy, and over the second, without the first token of each."""
    loss = token_losses(model, rows, batch_size=batch_size, title="copying").loss.double()
    copies = loss[:, 1 : rows.length], loss[:, rows.distance + 1 :]
    return [Totals.of_each(copy.mean(dim=1)) for copy in copies]
