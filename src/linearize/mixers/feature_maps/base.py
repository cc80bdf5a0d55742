"""The base classes of feature maps.

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

MIN_DENOMINATOR = 1e-6  # of features that have an absolute scale
# The log of a query's largest feature, if any factor cancels. Products with key features, which are at most 1, can then
# use almost the whole range of exponents of the dtype before they underflow. The rest of the range is for sums.
HEADROOM = {torch.float32: 56.0, torch.float64: 600.0}


class FeatureMap(nn.Module, ABC):
    """phi for queries and keys. Features are fp32, or fp64 for fp64 inputs. Call it outside autocast.

    Only the products phi_q.phi_k are defined: each map has its own order of features.

    Attributes:
        exponential: features are exponentials, and `k` returns their logarithms.
        feature_dim: F. key_heads: Hk, the heads of key features.
        kernel: phi_q.phi_k as a function of the dot product of `kernel_input`s; None: there is no closed form.
    """

    accumulates: ClassVar[bool] = True  # whether `_queries` and `_keys` read x in the dtype of features
    kernel: Kernel | None = None

    def __init__(self, config: Any, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.exponential = config, config.exponential
        self.feature_dim, self.key_heads = config.features(shape), config.key_heads(shape)

    def reset_parameters(self) -> None:
        """Initialise weights and fixed random numbers."""

    def min_denominator(self, dtype: torch.dtype) -> float:
        """Return the least denominator of a sum normalizer, for sums in `dtype`: 1e-6.

        Exponentials over a maximum have no absolute scale. For them it is the least number by which `dtype` can divide
        without loss of digits (fp32: 1e-31).
        """
        if not self.exponential:
            return MIN_DENOMINATOR
        return torch.finfo(dtype).tiny / torch.finfo(dtype).eps

    def q(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Return features of queries; those of an exponential map are divided by their largest, exp(e - max e).

        `position` counts from the document's first token; -1 is padding.
        """
        return self.scaled_q(x, position)[0]

    def scaled_q(
        self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"], level: Float[Tensor, "B H T"] | float = 0.0
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"] | None]:
        """Return features of queries, and for an exponential map the logarithm of their common divisor, else None.

        `level` is that logarithm less the query's largest; other maps ignore it. If it is a tensor, features are
        clamped to 1 / min_denominator: larger ones belong to sums of keys that are too small for the dtype.
        """
        x = accumulated(x) if self.accumulates else x
        logs = self._queries(x, position)
        if not self.exponential:
            return logs, None
        scale = logs.amax(-1) + level
        # The gradient of amax needs its input. Without gradients, overwriting it saves the time of a second tensor.
        logs = logs - scale[..., None] if logs.requires_grad else logs.sub_(scale[..., None])
        if isinstance(level, Tensor):
            logs = logs.clamp_max(-math.log(self.min_denominator(logs.dtype)))
        return logs.exp_(), scale + self._query_constant(x)

    def k(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Return features of keys; of an exponential map their logarithms e, less which callers subtract a maximum.

        Logarithms may be fp64 if fp32 cannot represent their differences (Performer). Subtract the maximum in their own
        dtype before you round.
        """
        return self._keys(accumulated(x) if self.accumulates else x, position)

    def kernel_input(self, x: Float[Tensor, "B h T D"]) -> Float[Tensor, "B h T X"]:
        """Return the inputs from which `kernel` computes the features of `q` and `k`. Maps with a kernel define it."""
        raise NotImplementedError(type(self).__name__)

    def _query_constant(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T"] | float:
        """Return the term that all logarithms of a query's features share, and that `_queries` omits."""
        return 0.0

    @abstractmethod
    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Return features, or logarithms (up to a constant per query)."""

    @abstractmethod
    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Return features, or logarithms."""


class Symmetric(FeatureMap):
    """A map that is the same function for queries and keys."""

    @abstractmethod
    def _map(self, x: Float[Tensor, "B h T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B h T F"]:
        """Return features, or logarithms, of queries or keys."""

    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        return self._map(x, position)

    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B G K F"]:
        return self._map(x, position)


def accumulated(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Return x in the dtype of features."""
    exact = x.dtype == torch.float32 or x.dtype == torch.float64
    if exact and (x.shape[2] == 1 or x.is_contiguous()):
        return x
    dtype = accumulation_dtype(x.dtype)
    # One pass casts and makes the tensor contiguous, as matrix products need it.
    return x.to(dtype, memory_format=torch.contiguous_format)


def exponentials(logs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return e^logs, with no gradient where it underflows to 0. Overwrites `logs` unless it requires a gradient."""
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
    """Return elu(x) + 1 without adding 1 to exp(x) - 1, which would lose the digits of a small exp(x)."""
    return x.relu() + x.clamp_max(0).exp_()
