"""T2R's map, which SUPRA has too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.configs.feature_maps import T2RMap
from linearize.mixers.feature_maps.base import elu1
from linearize.mixers.feature_maps.learned import Learned, as_it_is


class T2R(Learned[T2RMap]):
    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return ACTIVATIONS[self.config.activation](y)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "elu1": elu1, "none": as_it_is}
