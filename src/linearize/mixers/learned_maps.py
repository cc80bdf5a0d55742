"""Maps behind a learned projection x W + b: T2R, Hedgehog, LOLCAT, ReGLA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.mixers.feature_map import FeatureMap, elu1
from linearize.mixers.maps import HedgehogMap, LearnedMap, LolcatMap, ReglaMap, T2RMap
from linearize.mixers.shape import LayerShape
from linearize.ops.heads import repeat_kv

MIN_FEATURE = 1e-12  # LoLCATs' clamp


class Learned(FeatureMap):
    """phi(x) = f(x W + b), W per query head, per KV head or one over all heads side by side.

    Weights are [matrices, inputs, outputs]. Tied maps have no key weights; keys use those of the queries.
    """

    def __init__(self, config: LearnedMap, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.config, self.head_dim = config, shape.head_dim
        query, *key = config.projections(shape)
        self.query_weight, self.query_bias = _empty(query), _empty(query[::2]) if config.bias else None
        self.key_weight = _empty(key[0]) if key else None
        self.key_bias = _empty(key[0][::2]) if key and config.bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `init` says. The key map starts as a copy of the query map, unless it is wider or narrower.

        Query heads that share a key map start from the same one.
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
        return self._activate(self._project(x, self.query_weight, self.query_bias))

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        if self.key_weight is None:
            return self._activate(self._project(x, self.query_weight, self.query_bias))
        return self._activate(self._project(x, self.key_weight, self.key_bias))

    def _project(
        self, x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M I O"], bias: Float[Tensor, "M O"] | None
    ) -> Float[Tensor, "B h2 T N"]:
        over_model = self.config.per == "model"
        heads = x.shape[1] if over_model else 1
        weight = self._columns(weight.to(x.dtype), heads)
        bias = None if bias is None else self._bias_columns(bias.to(x.dtype), heads)
        if over_model:
            y = x.transpose(1, 2).flatten(2) @ weight[0]
            y = y if bias is None else y.add_(bias[0])
            return y.unflatten(-1, (heads, -1)).transpose(1, 2)
        # Query heads of a group share its keys, and where the map is tied, its weights.
        heads = max(x.shape[1], len(weight))
        y = repeat_kv(x, heads) @ _repeat(weight, heads)
        return y if bias is None else y.add_(_repeat(bias, heads)[:, None])

    def _columns(self, weight: Float[Tensor, "M I O"], heads: int) -> Float[Tensor, "M I N"]:
        """What inputs are multiplied by; the columns of `heads` heads lie side by side."""
        return weight

    def _bias_columns(self, bias: Float[Tensor, "M O"], heads: int) -> Float[Tensor, "M N"]:
        return bias

    @abstractmethod
    def _activate(self, y: Float[Tensor, "B h T N"]) -> Float[Tensor, "B h T F"]:
        """Features, or logarithms, from the projection, which may be overwritten."""


class T2R(Learned):
    """phi(x) = relu(x W + b) (T2R, Kasai et al. 2021; SUPRA sec. 3), elu(x W + b) + 1, or x W + b."""

    config: T2RMap

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return T2R_ACTIVATIONS[self.config.activation](y)


class Hedgehog(Learned):
    """phi(x) = [f(x W + b), f(-x W - b)] (Hedgehog eqs. 5-6; LoLCATs App. A), features at least 1e-12."""

    config: HedgehogMap

    # Both signs come from one product: two more columns cost less than to put two results together.
    def _columns(self, weight: Float[Tensor, "M I O"], heads: int) -> Float[Tensor, "M I N"]:
        return _both_signs(weight, heads)

    def _bias_columns(self, bias: Float[Tensor, "M O"], heads: int) -> Float[Tensor, "M N"]:
        return _both_signs(bias, heads)

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return HEDGEHOG_ACTIVATIONS[self.config.activation](y)


class Lolcat(Learned):
    """phi(x) = f(x W + x) (LOLCAT sec. 3)."""

    config: LolcatMap

    # One product with W + 1 instead of a product and a sum: as exact, since the sum would be rounded too.
    def _columns(self, weight: Float[Tensor, "M I O"], heads: int) -> Float[Tensor, "M I N"]:
        return weight + torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return LOLCAT_ACTIVATIONS[self.config.activation](y)


class Regla(Learned):
    """phi(x) = exp(x W + b) (ReGLA eqs. 11-12)."""

    config: ReglaMap

    def _activate(self, y: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        return y


def _empty(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _repeat(weight: Tensor, heads: int) -> Tensor:
    """Each matrix, or bias, once for every head that shares it."""
    return weight if len(weight) == heads else weight.repeat_interleave(heads // len(weight), dim=0)


def _both_signs(x: Float[Tensor, "*shape O"], heads: int) -> Float[Tensor, "*shape N"]:
    """Per head the columns, then their negatives."""
    x = x.unflatten(-1, (heads, -1))
    return torch.stack([x, -x], dim=-2).flatten(-3)


def _softmax(y: Float[Tensor, "*shape N"]) -> Float[Tensor, "*shape N"]:
    if y.requires_grad:
        return y.softmax(-1).clamp_min(MIN_FEATURE)
    return torch.softmax(y, -1, out=y).clamp_min_(MIN_FEATURE)


def _softmax_halves(y: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape F"]:
    return _softmax(y.unflatten(-1, (2, -1))).flatten(-2)


def _as_it_is(y: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape F"]:
    return y


T2R_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "elu1": elu1, "none": _as_it_is}
HEDGEHOG_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_halves": _softmax_halves,
    "softmax": _softmax,
    "exp": _as_it_is,
}
LOLCAT_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"exp": _as_it_is, "relu": torch.relu_, "elu1": elu1}
