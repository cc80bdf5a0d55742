"""Rows for encoders: texts with padding, and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.data.rows import PackedRows
from tests.hf.encoders import VISION, images, padded


@dataclass(frozen=True)
class Padded(PackedRows):
    """Texts of different lengths."""

    mask: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    def rows(self, indices: Tensor | Sequence[int] | slice) -> Padded:
        ids, mask = self.input_ids[indices], self.mask[indices]
        return Padded(ids, self.position_ids[indices], ids, mask)

    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "attention_mask": self.mask, "position_ids": self.position_ids}


@dataclass(frozen=True)
class Pixels(PackedRows):
    """Images of 16 patches behind one special token, or two."""

    pixel_values: Tensor
    positions: int

    @property
    def num_tokens(self) -> int:
        return len(self.pixel_values) * self.positions

    def rows(self, indices: Tensor | Sequence[int] | slice) -> Pixels:
        ids = self.input_ids[indices]
        return Pixels(ids, ids, ids, self.pixel_values[indices], self.positions)

    def inputs(self) -> dict[str, Any]:
        return {"pixel_values": self.pixel_values}


def encoder_rows(architecture: str, lengths: Sequence[int] = (9, 5, 7, 12), *, left: bool = False) -> PackedRows:
    """As many rows as there are lengths, which are those of texts."""
    if architecture in VISION:
        ids = torch.arange(len(lengths))[:, None]
        positions = 18 if architecture == "deit" else 17
        return Pixels(ids, ids, ids, images(len(lengths)), positions)
    inputs = padded(architecture, list(lengths), 12, left=left)
    return Padded(inputs["input_ids"], inputs["position_ids"], inputs["input_ids"], inputs["attention_mask"])
