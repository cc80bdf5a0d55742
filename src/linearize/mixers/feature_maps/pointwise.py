"""Elementwise maps: identity, silu, elu + 1, relu, exp. F = D."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import silu

from linearize.configs.feature_maps import ExpMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import Symmetric, elu1


class Identity(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x


class Silu(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return silu(x)


class Elu1(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return elu1(x)


class Relu(Symmetric):
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x.relu()


class Exp(Symmetric):
    def __init__(self, config: ExpMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.temperature = config.temperature

    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T D"]:
        return x * self.temperature
