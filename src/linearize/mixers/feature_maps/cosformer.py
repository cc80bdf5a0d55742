"""cosFormer's map: relu features times cosine and sine of the position, scaled to a quarter turn."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.configs.feature_maps import CosformerMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import Symmetric


class Cosformer(Symmetric):
    def __init__(self, config: CosformerMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.max_length = config.max_length or shape.max_positions

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        angle = position.clamp_min(0).to(x.dtype)[:, None, :, None, None] * (math.pi / 2 / self.max_length)
        return (x.relu()[..., None, :] * torch.cat([angle.cos(), angle.sin()], dim=-2)).flatten(-2)
