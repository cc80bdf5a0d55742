"""What every feature map is: the base class."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.mixers.maps import FeatureMapPart
from linearize.mixers.shape import LayerShape
from linearize.ops.kernel import Kernel
from linearize.ops.partial import accumulation_dtype


class FeatureMap(nn.Module, ABC):
    """phi for queries and keys. Features are fp32, or fp64 for fp64 inputs; to be called outside autocast.

    Only the kernel phi_q.phi_k has a meaning: the order of features is each map's own.

    Attributes:
        exponential: features are exponentials, and `k` returns their logarithms.
        feature_dim: F. key_heads: Hk, the heads of key features.
        min_denominator: the least that a sum normaliser divides by.
        kernel: phi_q.phi_k as a function of a dot product of the map's `kernel_input`, where there is one.
    """

    min_denominator: float = 1e-6
    kernel: Kernel | None = None

    def __init__(self, config: FeatureMapPart, shape: LayerShape) -> None:
        super().__init__()
        self.exponential = config.exponential
        self.feature_dim, self.key_heads = config.features(shape), config.key_heads(shape)

    def reset_parameters(self) -> None:
        """Initialise weights and fixed random numbers; most maps have none."""

    def q(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Features of queries; those of an exponential map are divided by their largest, exp(e - max e).

        `position` counts from the document's first token; -1 is padding.
        """
        return self.scaled_q(x, position)[0]

    def scaled_q(
        self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"] | None]:
        """The same, and for an exponential map the logarithm of what they were divided by."""
        x = accumulated(x)
        phi = self._queries(x, position)
        if not self.exponential:
            return phi, None
        phi, largest = over_largest(phi)
        return phi, largest + self._query_constant(x)

    def k(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Features of keys; of an exponential map their logarithms e, from which a running maximum is to be taken.

        Logarithms may be fp64 where fp32 cannot hold their differences (Performer): subtract the maximum in the dtype
        they come in, and only then round.
        """
        return self._keys(accumulated(x), position)

    def kernel_input(self, x: Float[Tensor, "B h T D"]) -> Float[Tensor, "B h T X"]:
        """What `kernel` makes the same features of as `q` and `k`, for a map with one."""
        raise NotImplementedError(type(self).__name__)

    def _query_constant(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T"] | float:
        """What the logarithms of `_queries` leave out, the same for all features of a query."""
        return 0.0

    @abstractmethod
    def _queries(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T F"]:
        """Features, or logarithms (up to a constant per query), of x in the dtype of the features."""

    @abstractmethod
    def _keys(self, x: Float[Tensor, "B G K D"], position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Features, or logarithms, of x in the dtype of the features."""


def accumulated(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """x in the dtype of features."""
    # One pass for the cast and for the order that matrix products want.
    return x.to(accumulation_dtype(x.dtype), memory_format=torch.contiguous_format)


def over_largest(logs: Float[Tensor, "*shape F"]) -> tuple[Float[Tensor, "*shape F"], Float[Tensor, "*shape"]]:
    """exp(e - max e) over the last axis, differentiable in the maximum too, and max e. May overwrite `logs`."""
    largest = logs.amax(-1, keepdim=True)
    # amax needs its input again for the gradient; without one, a second tensor of this size costs more than the sums.
    logs = logs - largest if logs.requires_grad else logs.sub_(largest)
    return logs.exp_(), largest[..., 0]


def elu1(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1 without the 1 in which a small exp(x) would drown."""
    return x.relu() + x.clamp_max(0).exp_()
