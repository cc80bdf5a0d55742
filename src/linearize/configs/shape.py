"""The sizes of an attention layer that a mixer needs."""

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
