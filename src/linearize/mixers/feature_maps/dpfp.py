"""DPFP: products of neighbouring rectified inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.configs.feature_maps import DpfpMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import Symmetric


class Dpfp(Symmetric):
    def __init__(self, config: DpfpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.nu = config.nu

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        # r preceded by a part of itself, so that r rolled by up to nu is a slice.
        twice = [x, -x] * 2
        r = torch.cat(twice[1:] if self.nu <= x.shape[-1] else twice, dim=-1).relu_()
        n = 2 * x.shape[-1]
        start = r.shape[-1] - n
        products = [r[..., start:] * r[..., start - j : start - j + n] for j in range(1, self.nu + 1)]
        return products[0] if self.nu == 1 else torch.cat(products, dim=-1)  # cat would copy even one
