"""The base classes of feature maps, as data and as modules.

H query heads, G KV heads, Hk heads of key features, D head dimension, F features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linearize.configs.shape import LayerShape
from linearize.ops.kernel import Kernel
from linearize.ops.partial import accumulation_dtype

MIN_DENOMINATOR = 1e-6  # of features in absolute scale
# Where a query's features may come in any scale, the largest is e to this: with keys' features, which are at most 1, a
# product then has all exponents of the dtype to be small in, and not the negative half. The rest is for sums over keys.
HEADROOM = {torch.float32: 56.0, torch.float64: 600.0}


class FeatureMap(nn.Module, ABC):
    """phi for queries and keys. Features are fp32, or fp64 for fp64 inputs; to be called outside autocast.

    Only the kernel phi_q.phi_k has a meaning: the order of features is each map's own.

    Attributes:
        exponential: features are exponentials, and `k` returns their logarithms.
        feature_dim: F. key_heads: Hk, the heads of key features.
        kernel: phi_q.phi_k as a function of a dot product of the map's `kernel_input`, where there is one.
    """

    accumulates: ClassVar[bool] = True  # whether `_queries` and `_keys` read x in the dtype of features
    kernel: Kernel | None = None

    def __init__(self, config: Any, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.exponential = config, config.exponential
        self.feature_dim, self.key_heads = config.features(shape), config.key_heads(shape)

    def reset_parameters(self) -> None:
        """Initialise weights and fixed random numbers; most maps have none."""

    def min_denominator(self, dtype: torch.dtype) -> float:
        """The least that a sum normaliser divides by, for sums in `dtype`: 1e-6.

        Exponentials over a maximum have no absolute scale, so for them it is what `dtype` can divide by with all its
        digits (fp32: 1e-31).
        """
        if not self.exponential:
            return MIN_DENOMINATOR
        return torch.finfo(dtype).tiny / torch.finfo(dtype).eps

    def q(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Features of queries; those of an exponential map are divided by their largest, exp(e - max e).

        `position` counts from the document's first token; -1 is padding.
        """
        return self.scaled_q(x, position)[0]

    def scaled_q(
        self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"], level: Float[Tensor, "B H T"] | float = 0.0
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"] | None]:
        """Features of queries, and for an exponential map the logarithm of what they are divided by.

        `level`: that logarithm less the query's largest; without meaning for other maps. Where it is a tensor, features
        are at most 1 / min_denominator: those that would be larger belong to sums of keys too small for the dtype.
        """
        x = accumulated(x) if self.accumulates else x
        logs = self._queries(x, position)
        if not self.exponential:
            return logs, None
        scale = logs.amax(-1) + level
        # amax needs its input again for the gradient; without one, a second tensor costs more than the sums.
        logs = logs - scale[..., None] if logs.requires_grad else logs.sub_(scale[..., None])
        if isinstance(level, Tensor):
            logs = logs.clamp_max(-math.log(self.min_denominator(logs.dtype)))
        return logs.exp_(), scale + self._query_constant(x)

    def k(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Features of keys; of an exponential map their logarithms e, from which a running maximum is to be taken.

        Logarithms may be fp64 where fp32 cannot hold their differences (Performer): subtract the maximum in the dtype
        they come in, and only then round.
        """
        return self._keys(accumulated(x) if self.accumulates else x, position)

    def kernel_input(self, x: Float[Tensor, "B h T D"]) -> Float[Tensor, "B h T X"]:
        """Return the inputs from which `kernel` computes the features of `q` and `k`, for a map with a kernel."""
        raise NotImplementedError(type(self).__name__)

    def _query_constant(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T"] | float:
        """Return what the logarithms of `_queries` leave out, the same for all features of a query."""
        return 0.0

    @abstractmethod
    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Features, or logarithms (up to a constant per query)."""

    @abstractmethod
    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Features, or logarithms."""


class Symmetric(FeatureMap):
    """A map that does the same to queries and keys."""

    @abstractmethod
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        """Features, or logarithms, of queries or keys."""

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return self._map(x, position)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        return self._map(x, position)


def accumulated(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """x in the dtype of features."""
    exact = x.dtype == torch.float32 or x.dtype == torch.float64
    if exact and (x.shape[2] == 1 or x.is_contiguous()):
        return x
    dtype = accumulation_dtype(x.dtype)
    # One pass for the cast and for the order that matrix products want.
    return x.to(dtype, memory_format=torch.contiguous_format)


def exponentials(logs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^logs, without a gradient where that is 0 in this dtype. Overwrites `logs` where no gradient is wanted."""
    return _Exp.apply(logs) if logs.requires_grad else logs.exp_()


class _Exp(torch.autograd.Function):
    """Zero the gradients of weights that underflow: these gradients may be infinite, and 0 times infinity is NaN."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor) -> Tensor:
        y = logs.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, grad * y, 0)


def elu1(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1 without the 1 in which a small exp(x) would drown."""
    return x.relu() + x.clamp_max(0).exp_()
