"""Which rows are looked at closely: a few of the held-out ones, of text or of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from linearize.data.rows import PackedRows, Rows
from linearize.data.splits import ENOUGH


@dataclass(frozen=True)
class ChosenRows:
    """A model's inputs for the rows that are looked at, on the CPU, and how many tokens they have, padding apart."""

    inputs: dict[str, Any]
    tokens: int

    def __len__(self) -> int:
        return next(len(x) for x in self.inputs.values() if isinstance(x, Tensor))

    @property
    def input_ids(self) -> Int[Tensor, "N L"]:
        """Tokens; only text has them."""
        return self.inputs["input_ids"]

    def part(self, rows: slice) -> dict[str, Any]:
        """The inputs of some rows."""
        return {name: x[rows] if isinstance(x, Tensor) else x for name, x in self.inputs.items()}


def spread_rows(rows: PackedRows, max_tokens: int) -> PackedRows:
    """As many rows as hold `max_tokens` tokens together, of all documents alike; at least what an interval needs."""
    return rows.spread(max(ENOUGH, max_tokens // rows.input_ids.shape[1]))


def drawn_rows(rows: Rows, max_tokens: int, seed: int) -> ChosenRows:
    """As many of the rows, drawn by `seed`, as hold at most `max_tokens`; of one text, if it is longer, the start.

    Rows of different lengths count as their mean.
    """
    total = len(rows)
    length = max(1, rows.num_tokens // total)
    count = min(total, max(1, max_tokens // length))
    index = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    chosen = rows.rows(index)
    inputs = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in chosen.inputs().items()}
    if "input_ids" not in inputs:
        return ChosenRows(inputs, chosen.num_tokens)
    if count == 1:
        inputs = {name: x[:, :max_tokens] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    mask = inputs.get("attention_mask")
    return ChosenRows(inputs, int(inputs["input_ids"].numel() if mask is None else mask.sum()))
