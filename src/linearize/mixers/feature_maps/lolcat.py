"""LOLCAT's map: a skip connection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.configs.feature_maps import LolcatMap
from linearize.mixers.feature_maps.base import elu1
from linearize.mixers.feature_maps.learned import Learned, as_it_is


class Lolcat(Learned[LolcatMap]):
    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T N"]:
        # One product with W + 1 instead of a product and a sum: as exact, since the sum would be rounded too.
        one = torch.eye(weight.shape[1], dtype=x.dtype, device=x.device)
        return super()._project(x, weight.to(x.dtype) + one, bias)

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return ACTIVATIONS[self.config.activation](y)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"exp": as_it_is, "relu": torch.relu_, "elu1": elu1}
