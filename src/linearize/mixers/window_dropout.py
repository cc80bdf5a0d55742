"""Against bypass of the linear part: in training, some sequences go without their window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass
class WindowDropout:
    """Hides the window of this share of sequences from their queries, as long as they have keys below it."""

    rate: float
    generator: torch.Generator

    def draw(self, batch: int) -> Bool[Tensor, " B"]:
        """Which sequences go without their window this time; drawn on the CPU, the same on every device."""
        return torch.rand(batch, generator=self.generator) < self.rate
