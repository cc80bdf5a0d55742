"""T2R's map, which SUPRA has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.base import UserError
from linearize.mixers.feature_maps.base import ROTATION, FeatureMapConfig, Rotation, elu1
from linearize.mixers.feature_maps.learned import Learned, LearnedMap, as_it_is
from linearize.mixers.shape import LayerShape


class T2RMap(LearnedMap):
    """phi(x) = relu(x W + b) (T2R, Kasai et al. 2021; SUPRA sec. 3: one W over all heads, features rotated)."""

    type: Literal["t2r"] = "t2r"
    rotation: Rotation = Field(default="before", description=ROTATION)
    feature_dim: PositiveInt | None = Field(
        default=None, description="F, features per head; the head dimension if null, as it must be to be rotated after"
    )
    activation: Literal["relu", "elu1", "none"] = Field(
        default="relu",
        description="SUPRA's ablations: elu1, elu(x W + b) + 1; none, x W + b alone, whose kernel can be negative",
    )
    bias: bool = Field(default=True, description="x W + b instead of x W")
    init: Literal["identity", "kaiming", "linear"] = Field(
        default="kaiming", description="LoLCATs' T2R: kaiming; SUPRA: linear. Not zero: relu has no gradient there"
    )

    @property
    def mixed_signs(self) -> bool:
        return self.activation == "none"

    @property
    def signed(self) -> bool:
        return self.rotation == "after" or self.mixed_signs

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or shape.head_dim

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        features = self.features(shape)
        if self.rotation == "after" and features != shape.head_dim:
            raise UserError(
                f"mixer.feature_map.feature_dim: expected the teacher's head dimension, {shape.head_dim}, because "
                f"rotation is `after` the map; found {features}; set feature_dim=null"
            )
        return super().resolved(shape).model_copy(update={"feature_dim": features})


class T2R(Learned):
    config: T2RMap

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return ACTIVATIONS[self.config.activation](y)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "elu1": elu1, "none": as_it_is}
