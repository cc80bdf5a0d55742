"""RFA's random Fourier features."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.configs.feature_maps import RfaMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import FeatureMap


class Rfa(FeatureMap):
    """Random Fourier features: normal numbers [G, F/2, D] are fixed and sigma [G] is learned, both per KV head."""

    weight: Tensor

    def __init__(self, config: RfaMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.sigma = nn.Parameter(torch.empty(shape.num_kv_heads))
        self.register_buffer("weight", torch.empty(shape.num_kv_heads, self.feature_dim // 2, shape.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W; sigma starts at 1."""
        self.sigma.fill_(1)
        self.weight.normal_()

    def min_denominator(self, dtype: torch.dtype) -> float:
        """Return 1, as in the paper's code: the kernel can be negative."""
        return 1.0

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        return self._queries(x, position)

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        weight = self.sigma.to(x.dtype)[:, None, None] * self.weight.to(x.dtype)
        weight = weight.repeat_interleave(x.shape[1] // len(weight), dim=0)
        # The derivative of this norm at 0 is 0, not NaN.
        unit = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-3)
        angle = unit @ weight.mT
        return torch.cat([angle.sin(), angle.cos()], dim=-1).mul_(weight.shape[1] ** -0.5)
