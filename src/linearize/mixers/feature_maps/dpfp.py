"""DPFP: products of neighbouring rectified inputs."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.base import UserError
from linearize.mixers.feature_maps.base import FeatureMapConfig, Symmetric
from linearize.mixers.shape import LayerShape


class DpfpMap(FeatureMapConfig):
    """phi(x) = concat over j = 1..nu of r * roll(r, j), r = [relu(x), relu(-x)]; F = 2 D nu (Schlag et al. 2021)."""

    type: Literal["dpfp"] = "dpfp"
    nu: PositiveInt = Field(default=1, description="the paper's capacity parameter, less than 2D")

    def features(self, shape: LayerShape) -> int:
        return 2 * shape.head_dim * self.nu

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        if self.nu >= 2 * shape.head_dim:
            raise UserError(
                f"mixer.feature_map.nu: expected less than twice the teacher's head dimension, {2 * shape.head_dim}, "
                f"from where on features repeat; found {self.nu}"
            )
        return self


class Dpfp(Symmetric):
    def __init__(self, config: DpfpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.nu = config.nu

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        # r behind a part of itself, long enough that r rolled by up to nu is a slice.
        twice = [x, -x] * 2
        r = torch.cat(twice[1:] if self.nu <= x.shape[-1] else twice, dim=-1).relu_()
        n = 2 * x.shape[-1]
        start = r.shape[-1] - n
        products = [r[..., start:] * r[..., start - j : start - j + n] for j in range(1, self.nu + 1)]
        return products[0] if self.nu == 1 else torch.cat(products, dim=-1)  # cat would copy even one
