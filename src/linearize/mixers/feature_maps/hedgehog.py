"""Hedgehog's map, which LoLCATs has too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.configs.feature_maps import HedgehogMap
from linearize.mixers.feature_maps.learned import Learned
from linearize.ops.dispatch import implementation_for

MIN_FEATURE = 1e-12  # LoLCATs' clamp


class Hedgehog(Learned[HedgehogMap]):
    """Features of a softmax are at least 1e-12."""

    def _features(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T F"]:
        if self.config.per != "model" and implementation_for(x.device) == "triton":
            from linearize.ops.triton_backend import hedgehog  # loaded only where it is chosen

            phi = hedgehog(x, weight, bias, self.config.activation, MIN_FEATURE)
            if phi is not None:
                return phi
        return super()._features(x, weight, bias)

    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T 2 N"]:
        if x.shape[2] == 1:
            y = super()._project(x, weight, bias)
            return torch.cat([y, -y], dim=3).view(*y.shape[:3], 2, -1)
        # Of many tokens both signs come from one product: twice the columns cost less than to join two results.
        heads = x.shape[1] if self.config.per == "model" else 1
        bias = None if bias is None else _both_signs(bias, heads)
        return super()._project(x, _both_signs(weight, heads), bias).unflatten(-1, (2, -1))

    def _activate(self, y: Float[Tensor, "B h T 2 N"]) -> Float[Tensor, "B h T F"]:
        return ACTIVATIONS[self.config.activation](y)


def _both_signs(x: Float[Tensor, "*shape O"], heads: int) -> Float[Tensor, "*shape N"]:
    """Per head the columns, then their negatives."""
    x = x.unflatten(-1, (heads, -1))
    return torch.stack([x, -x], dim=-2).flatten(-3)


def _softmax(y: Float[Tensor, "*shape N"]) -> Float[Tensor, "*shape N"]:
    if y.requires_grad:
        return y.softmax(-1).clamp_min(MIN_FEATURE)
    return torch.softmax(y, -1, out=y).clamp_min_(MIN_FEATURE)


def _softmax_halves(y: Float[Tensor, "*shape 2 N"]) -> Float[Tensor, "*shape F"]:
    return _softmax(y).flatten(-2)


def _softmax_whole(y: Float[Tensor, "*shape 2 N"]) -> Float[Tensor, "*shape F"]:
    return _softmax(y.flatten(-2))


def _logarithms(y: Float[Tensor, "*shape 2 N"]) -> Float[Tensor, "*shape F"]:
    return y.flatten(-2)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_halves": _softmax_halves,
    "softmax": _softmax_whole,
    "exp": _logarithms,
}
