"""Maps with a learned projection x W + b: T2R (and SUPRA), Hedgehog (and LoLCATs), LOLCAT and ReGLA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.configs.feature_maps import HedgehogMap, LearnedMap, LolcatMap, ReglaMap, T2RMap
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import FeatureMap, accumulated, elu1
from linearize.ops.dispatch import implementation_for
from linearize.ops.heads import repeat_kv

AnyLearnedMap = TypeVar("AnyLearnedMap", bound=LearnedMap)
MIN_FEATURE = 1e-12  # LoLCATs' clamp

# --- the projection ---------------------------------------------------------------------------------------------------


class Learned(FeatureMap, Generic[AnyLearnedMap]):
    """phi(x) = f(x W + b), with W per query head, per KV head, or one for all heads concatenated.

    Weights are [matrices, inputs, outputs]. Tied maps have no key weights; keys use those of the queries.
    """

    config: AnyLearnedMap

    accumulates = False  # `_features` may have a kernel that reads x in its own dtype

    def __init__(self, config: AnyLearnedMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.head_dim = shape.head_dim
        query, *key = config.projections(shape)
        self.query_weight, self.query_bias = _empty(query), _empty(query[::2]) if config.bias else None
        self.key_weight = _empty(key[0]) if key else None
        self.key_bias = _empty(key[0][::2]) if key and config.bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights as the config's `init` says.

        The query map starts as a copy of the key map, unless their sizes differ. Query heads that share a key map start
        from the same one.
        """
        self._initialise(self.query_weight, self.query_bias)
        if self.key_weight is None:
            return
        self._initialise(self.key_weight, self.key_bias)
        if self.key_weight.shape[1:] == self.query_weight.shape[1:]:
            heads = len(self.query_weight)
            self.query_weight.copy_(_repeat(self.key_weight, heads))
            if self.query_bias is not None and self.key_bias is not None:
                self.query_bias.copy_(_repeat(self.key_bias, heads))

    def _initialise(self, weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None) -> None:
        if bias is not None:
            bias.zero_()
        if self.config.init == "identity":
            heads = weight.shape[1] // self.head_dim
            one = torch.eye(self.head_dim, weight.shape[2] // heads, device=weight.device)
            weight.copy_(torch.block_diag(*[one] * heads))
        elif self.config.init == "kaiming":
            nn.init.kaiming_uniform_(weight)
        elif self.config.init == "linear":
            for tensor in (weight, bias):
                if tensor is not None:
                    nn.init.uniform_(tensor, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        else:
            weight.zero_()

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return self._features(x, self.query_weight, self.query_bias)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        if self.key_weight is None:
            return self._features(x, self.query_weight, self.query_bias)
        return self._features(x, self.key_weight, self.key_bias)

    def _features(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T F"]:
        return self._activate(self._project(accumulated(x), weight, bias))

    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T N"]:
        weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if self.config.per == "model":
            heads = x.shape[1]
            y = x.transpose(1, 2).flatten(2) @ weight[0]
            y = y if bias is None else y.add_(bias[0])
            return y.unflatten(-1, (heads, -1)).transpose(1, 2)
        # Query heads of a group share its keys and, if the map is tied, its weights.
        heads = max(x.shape[1], weight.shape[0])
        x, weight = repeat_kv(x, heads), _repeat(weight, heads)
        # torch.bmm on a single row takes half as many operations.
        y = torch.bmm(x.view(x.shape[1:]), weight)[None] if len(x) == 1 else x @ weight
        return y if bias is None else y.add_(_repeat(bias, heads)[:, None])

    @abstractmethod
    def _activate(self, y: Float[Tensor, "B h T N"]) -> Float[Tensor, "B h T F"]:
        """Return features, or logarithms, from the projection, which may be overwritten."""


def _empty(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _repeat(weight: Tensor, heads: int) -> Tensor:
    """Repeat each matrix, or bias, for every head that shares it."""
    return weight if weight.shape[0] == heads else weight.repeat_interleave(heads // len(weight), dim=0)


# --- the maps ---------------------------------------------------------------------------------------------------------


class T2R(Learned[T2RMap]):
    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return _T2R[self.config.activation](y)


class Lolcat(Learned[LolcatMap]):
    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T N"]:
        # One product with W + 1 instead of a product and a sum. It is as exact, since the sum would be rounded too.
        one = torch.eye(weight.shape[1], dtype=x.dtype, device=x.device)
        return super()._project(x, weight.to(x.dtype) + one, bias)

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return _LOLCAT[self.config.activation](y)


class Regla(Learned[ReglaMap]):
    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return y


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
        # For many tokens, one product with both signs costs less than concatenating two results.
        heads = x.shape[1] if self.config.per == "model" else 1
        bias = None if bias is None else _both_signs(bias, heads)
        return super()._project(x, _both_signs(weight, heads), bias).unflatten(-1, (2, -1))

    def _activate(self, y: Float[Tensor, "B h T 2 N"]) -> Float[Tensor, "B h T F"]:
        return _HEDGEHOG[self.config.activation](y)


# --- activations ------------------------------------------------------------------------------------------------------


def as_it_is(y: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape F"]:
    return y


def _both_signs(x: Float[Tensor, "*shape O"], heads: int) -> Float[Tensor, "*shape N"]:
    """Return, for each head, the columns followed by their negatives."""
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


Activation = Callable[[Tensor], Tensor]
_T2R: dict[str, Activation] = {"relu": torch.relu_, "elu1": elu1, "none": as_it_is}
_LOLCAT: dict[str, Activation] = {"exp": as_it_is, "relu": torch.relu_, "elu1": elu1}
_HEDGEHOG: dict[str, Activation] = {"softmax_halves": _softmax_halves, "softmax": _softmax_whole, "exp": _logarithms}
