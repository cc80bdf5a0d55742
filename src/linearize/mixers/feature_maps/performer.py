"""Performer's positive random features."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.configs.feature_maps import PerformerMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import FeatureMap


class Performer(FeatureMap):
    """Positive random features with one W [F, D] for all heads, queries and keys.

    W has blocks of D orthogonal rows (the last block may have fewer) with the norms of normal vectors.
    """

    weight: Tensor

    def __init__(self, config: PerformerMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.register_buffer("weight", torch.empty(self.feature_dim, shape.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W."""
        m, D = self.weight.shape
        Q, R = torch.linalg.qr(torch.randn(-(-m // D), D, D, device=self.weight.device))
        # Without the signs Q is not uniform over rotations, and the features are biased.
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        norms = torch.randn(m, D, device=self.weight.device).norm(dim=1, keepdim=True)
        self.weight.copy_(Q.flatten(0, 1)[:m] * norms)

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return x @ (self.weight.mT.to(x.dtype) * x.shape[-1] ** -0.25)

    def _query_constant(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T"]:
        return -(x.square().sum(-1) * (x.shape[-1] ** -0.5 / 2) + math.log(self.feature_dim) / 2)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        # |x'|^2 / 2 decides the relative weights of keys. It reaches 1e9 for inputs of 1e4, where adjacent fp32 numbers
        # differ by 64; for inputs of 1e3 they differ by 0.5.
        x = x.double()
        logs = self._queries(x, position)
        half_square = x.square().sum(-1, keepdim=True) * (x.shape[-1] ** -0.5 / 2)
        return logs.sub_(half_square + math.log(self.feature_dim) / 2)
