"""Maps of one number at a time: identity, elu + 1, relu, exp. F = D."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float, Int
from pydantic import Field, PositiveFloat
from torch import Tensor

from linearize.mixers.feature_maps.base import ROTATION, FeatureMapConfig, Rotation, Symmetric, elu1
from linearize.mixers.shape import LayerShape


class FlatMap(FeatureMapConfig):
    """A map with one feature per input dimension, F = D, which may also be rotated after the map (SUPRA)."""

    rotation: Rotation = Field(default="before", description=ROTATION)

    @property
    def signed(self) -> bool:
        return self.rotation == "after" or self.mixed_signs


class IdentityMap(FlatMap):
    """phi(x) = x (RetNet, GLA, fast decay)."""

    type: Literal["identity"] = "identity"
    mixed_signs: ClassVar[bool] = True


class Identity(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x


class Elu1Map(FlatMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020)."""

    type: Literal["elu1"] = "elu1"


class Elu1(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return elu1(x)


class ReluMap(FlatMap):
    """phi(x) = relu(x)."""

    type: Literal["relu"] = "relu"


class Relu(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x.relu()


class ExpMap(FlatMap):
    """phi(x) = exp(t x) (Hedgehog sec. 3.2); keys carry their running maximum."""

    type: Literal["exp"] = "exp"
    temperature: PositiveFloat = Field(default=1.0, description="t: the higher, the spikier the attention")
    exponential: ClassVar[bool] = True


class Exp(Symmetric):
    def __init__(self, config: ExpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.temperature = config.temperature

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x * self.temperature
