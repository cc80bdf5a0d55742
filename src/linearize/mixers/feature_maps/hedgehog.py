"""Hedgehog's map, which LoLCATs has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.base import UserError
from linearize.mixers.feature_maps.base import Even, FeatureMapConfig
from linearize.mixers.feature_maps.learned import Learned, LearnedMap
from linearize.mixers.shape import LayerShape
from linearize.ops.dispatch import backend_for

MIN_FEATURE = 1e-12  # LoLCATs' clamp


class HedgehogMap(LearnedMap):
    """phi(x) = [f(x W + b), f(-x W - b)] (Hedgehog eqs. 5-6; LoLCATs App. A: f = softmax over each half, no bias)."""

    type: Literal["hedgehog"] = "hedgehog"
    feature_dim: Even | None = Field(
        default=None, description="F, features per head, even; `expansion` times the head dimension if null"
    )
    expansion: PositiveInt = Field(
        default=1, description="F / D where feature_dim is null: 1 as in LoLCATs, 2 as in Hedgehog"
    )
    activation: Literal["softmax_halves", "softmax", "exp"] = Field(
        default="softmax_halves",
        description="softmax over each half (Hedgehog eq. 5; LoLCATs), over all features, or exponentials alone "
        "(Hedgehog eq. 6 and its listing), which keep how large a key is",
    )

    @property
    def exponential(self) -> bool:
        return self.activation == "exp"

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or self.expansion * shape.head_dim

    def outputs(self, shape: LayerShape) -> int:
        return self.features(shape) // 2

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        features = self.features(shape)
        if features % 2:
            raise UserError(
                f"mixer.feature_map.feature_dim: expected an even number; the teacher's head dimension, "
                f"{shape.head_dim}, is odd, so set one"
            )
        return super().resolved(shape).model_copy(update={"feature_dim": features})


class Hedgehog(Learned):
    """Features of a softmax are at least 1e-12."""

    config: HedgehogMap

    def _features(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T F"]:
        if self.config.per == "model":
            return super()._features(x, weight, bias)
        phi = backend_for(x.device).hedgehog(x, weight, bias, self.config.activation, MIN_FEATURE)
        return super()._features(x, weight, bias) if phi is None else phi

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
