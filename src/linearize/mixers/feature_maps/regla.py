"""ReGLA's map: exponentials of a projection."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.mixers.feature_maps.learned import Learned, LearnedMap
from linearize.mixers.shape import LayerShape


class ReglaMap(LearnedMap):
    """phi_q(x) = exp(x W - max over features), phi_k(x) = exp(x W - running maximum) (ReGLA eqs. 11-12)."""

    type: Literal["regla"] = "regla"
    feature_dim: PositiveInt = Field(default=64, description="F, features per head")
    exponential: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim


class Regla(Learned):
    config: ReglaMap

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return y
