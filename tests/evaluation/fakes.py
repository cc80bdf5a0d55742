"""Fake rows and models whose loss is known by construction, and candidates of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from linearize.data.rows import PackedRows
from linearize.evaluation.candidates import Candidate


def packed(documents: list[list[int]], *, vocab_size: int = 50, seed: int = 0) -> PackedRows:
    """One row per list of document lengths; random tokens, no loss on a document's first token."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    input_ids = torch.randint(vocab_size, positions.shape, generator=generator)
    return PackedRows(input_ids, positions, input_ids.masked_fill(positions == 0, -100))


class Fake(nn.Module):
    """Logits of `scale` for the token that stood `distance` - 1 before the current one, 0 for all others."""

    def __init__(self, *, distance: int = 1, scale: float = 0.0, vocab_size: int = 50) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.dropout = nn.Dropout(0.5)
        self.distance, self.vocab_size = distance, vocab_size

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        told = self.distance - 1
        copied = nn.functional.one_hot(input_ids[:, : input_ids.shape[1] - told], self.vocab_size)
        logits[:, told:] = self.scale * copied
        return SimpleNamespace(logits=self.dropout(logits))


def candidate(name: str, model: Any, opened: list[str] | None = None) -> Candidate:
    """A model with a note; when it is opened and closed is written into `opened`."""

    @contextmanager
    def open_() -> Iterator[Any]:
        if opened is not None:
            opened.append(name)
        yield model
        if opened is not None:
            opened.append(f"{name} closed")

    return Candidate(name, open_, f"note on {name}")
