"""cosFormer's map: positions as angles of a quarter turn."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.mixers.feature_maps.base import FeatureMapConfig, Symmetric
from linearize.mixers.shape import LayerShape


class CosformerMap(FeatureMapConfig):
    """phi(x_i) = [relu(x) cos(pi i / 2M), relu(x) sin(pi i / 2M)], i the position, F = 2D (Qin et al. 2022)."""

    of_one_key: ClassVar[bool] = False

    type: Literal["cosformer"] = "cosformer"
    rotation: Literal["none"] = Field(default="none", description="positions enter through cos and sin instead of RoPE")
    max_length: PositiveInt | None = Field(
        default=None, description="M: keys this far away weigh nothing; the model's maximum positions if null"
    )

    def features(self, shape: LayerShape) -> int:
        return 2 * shape.head_dim

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        return self.model_copy(update={"max_length": self.max_length or shape.max_positions})


class Cosformer(Symmetric):
    def __init__(self, config: CosformerMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.max_length = config.max_length or shape.max_positions

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        angle = position.clamp_min(0).to(x.dtype)[:, None, :, None, None] * (math.pi / 2 / self.max_length)
        return (x.relu()[..., None, :] * torch.cat([angle.cos(), angle.sin()], dim=-2)).flatten(-2)
