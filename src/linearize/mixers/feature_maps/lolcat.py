"""LOLCAT's map: a skip connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from linearize.mixers.feature_maps.base import elu1
from linearize.mixers.feature_maps.learned import Learned, LearnedMap, as_it_is


class LolcatMap(LearnedMap):
    """phi(x) = f(x W + x): a skip connection, F = D (LOLCAT sec. 3)."""

    type: Literal["lolcat"] = "lolcat"
    activation: Literal["exp", "relu", "elu1"] = Field(default="exp", description="f; elu1 is elu(x) + 1")
    init: Literal["identity", "kaiming", "linear", "zero"] = Field(
        default="zero", description="as in every learned map; zero, the paper's, starts as f(x)"
    )

    @property
    def exponential(self) -> bool:
        return self.activation == "exp"


class Lolcat(Learned):
    config: LolcatMap

    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T N"]:
        # One product with W + 1 instead of a product and a sum: as exact, since the sum would be rounded too.
        one = torch.eye(weight.shape[1], dtype=x.dtype, device=x.device)
        return super()._project(x, weight.to(x.dtype) + one, bias)

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return ACTIVATIONS[self.config.activation](y)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"exp": as_it_is, "relu": torch.relu_, "elu1": elu1}
