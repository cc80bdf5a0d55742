"""The sizes that a mixer needs to know of the layer whose place it takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer; `hidden_size` and `max_positions` are the model's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_positions: int
