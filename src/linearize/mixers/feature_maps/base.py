"""What every feature map is, as data and as a module.

H query heads, G KV heads, Hk heads of key features, D head dimension, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import AfterValidator, Field, PositiveInt
from torch import Tensor, nn

from linearize.base import Config
from linearize.mixers.shape import LayerShape
from linearize.ops.kernel import Kernel
from linearize.ops.partial import accumulation_dtype

Rotation = Literal["before", "after", "none"]
ROTATION = (
    "before: the map sees queries and keys rotated (RoPE), as the teacher's softmax does; after: features are rotated "
    "instead (SUPRA), so the kernel can be negative; none: no rotation, order is known by decay alone"
)


def _even(features: int) -> int:
    if features % 2:
        raise ValueError(f"expected an even number, because features come in pairs; found {features}")
    return features


Even = Annotated[PositiveInt, AfterValidator(_even)]


class FeatureMapConfig(Config):
    """What every map says of itself as data.

    `signed`: the kernel phi_q.phi_k can be negative, so no sum normalises it. `mixed_signs`: unrotated features can be
    negative. `exponential`: features are exponentials, divided by a query's largest or the keys' running maximum.
    `closed_form`: the kernel is a function of one dot product, so features are made where states are and not kept.
    """

    exponential: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    mixed_signs: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False

    rotation: Literal["before", "none"] = Field(
        default="before",
        description="before: the map sees queries and keys rotated (RoPE), as the teacher's softmax does; "
        "none: unrotated, and the linear part knows order by decay alone",
    )

    @property
    def maximum_bytes(self) -> int:
        """Bytes of one number of the running maximum, which is as precise as the logarithms: fp32."""
        return 4

    def features(self, shape: LayerShape) -> int:
        """F: features per head."""
        return shape.head_dim

    def key_heads(self, shape: LayerShape) -> int:
        """Hk: heads of key features, H or G."""
        return shape.num_kv_heads

    def parameters(self, shape: LayerShape) -> int:
        """Trainable numbers in one layer."""
        return 0

    def flops(self, shape: LayerShape) -> int:
        """One token's query and key through the projection, learned or random: 2 per multiplication."""
        return 0

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        """The map with every size filled in that may be left to the teacher.

        Raises:
            UserError: a size that makes no sense for these layers.
        """
        return self


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

    def __init__(self, config: Any, shape: LayerShape) -> None:
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
        """Features of queries, and for an exponential map the logarithm of what they were divided by."""
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
