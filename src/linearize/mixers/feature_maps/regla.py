"""ReGLA's map: exponentials of a projection."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from linearize.configs.feature_maps import ReglaMap
from linearize.mixers.feature_maps.learned import Learned


class Regla(Learned[ReglaMap]):
    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return y
