"""The base class of mixers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.configs.spans import Span
from linearize.mixers.feature_maps import FEATURE_MAPS
from linearize.mixers.feature_maps.base import HEADROOM, FeatureMap
from linearize.mixers.gates import DeltaRule
from linearize.mixers.inputs import AttnInputs, apply_rope
from linearize.ops.kernel import Kernel
from linearize.ops.layout import SequenceLayout, Tokens
from linearize.ops.partial import Partial, accumulation_dtype


class LinearFeatures(NamedTuple):
    """The inputs of the linear part, for whole documents.

    Attributes:
        tokens: the mixer's slots.
        phi_q, phi_k: features of queries, and of keys as they are written to the state.
        log_scale: logarithm of the factor by which a query's weights were divided; 0 if the combination ignores it.
    """

    tokens: Tokens
    phi_q: Float[Tensor, "B H T F"]
    phi_k: Float[Tensor, "B Hs T F"]
    log_scale: Float[Tensor, "B H T"]


class Mixer(nn.Module, ABC):
    """Base class of mixers: a feature map, a normalizer and a combination. Subclasses set the parts that they have.

    Attributes:
        causal: whether a query's keys are those up to its own; else all of its document.
        feature_map, gate, delta: None if the config names none.
        exponential: whether there is a map whose features are exponentials.
        scale: factor of phi_q . phi_k.
        kernel: phi_q . phi_k in closed form; the ops then make the features. None: this mixer uses no closed form.
        state_heads: Hs, heads of the linear part's state.
    """

    causal: ClassVar[bool]
    normalizer: nn.Module
    combine: nn.Module

    def __init__(self, config: MixerConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.state_heads = config.state_heads(shape)
        self.feature_map: FeatureMap | None = None
        self.gate: Any = None
        self.delta: DeltaRule | None = None
        self.kernel: Kernel | None = None
        if config.feature_map is not None:
            self.feature_map = FEATURE_MAPS[type(config.feature_map)](config.feature_map, shape)
            self.scale = config.scale_factor(shape)
        self.exponential = self.feature_map is not None and self.feature_map.exponential

    def parts(self) -> Iterator[tuple[tuple[int, ...], Mixer]]:
        """Yield the KV heads and the mixer of each group of heads; here one group of all heads."""
        yield tuple(range(self.shape.num_kv_heads)), self

    def reset_parameters(self) -> None:
        """Initialise every parameter as the config says."""
        part: Any
        for part in self.children():
            part.reset_parameters()

    @property
    def span(self) -> Span:
        """Return the config's span, which divides a query's keys between the window and the linear part."""
        return self.config.span

    @property
    def wants_hidden(self) -> bool:
        """Return whether `AttnInputs.hidden` is read."""
        return self.config.reads_hidden

    @property
    def wants_unrotated(self) -> bool:
        """Return whether `AttnInputs.unrotated` and `.rope` are read, in a model with RoPE."""
        return self.config.reads_unrotated

    @property
    def in_any_scale(self) -> bool:
        """Return whether a query's features are exponentials whose common factor cancels."""
        return self.exponential and self.config.any_scale

    @abstractmethod
    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Float[Tensor, "B H T D"]:
        """Return outputs for whole documents. `layout` None: one full document per row."""

    @abstractmethod
    def partials(self, inputs: AttnInputs, layout: SequenceLayout) -> tuple[Partial | None, Partial | None]:
        """Return the partials of window and linear part for whole documents, None for a missing part."""

    @abstractmethod
    def linear_features(self, inputs: AttnInputs, layout: SequenceLayout) -> LinearFeatures:
        """Return features of all tokens; there must be a linear part.

        Call it outside autocast, with `inputs.accumulated()`.
        """

    def normalized(self, linear: Partial, inputs: AttnInputs) -> Float[Tensor, "B H T D"]:
        """Return the linear part's own output from its sums, which may be overwritten unless they require gradients."""
        assert self.feature_map is not None
        return self.normalizer(linear, inputs, self.feature_map.min_denominator(linear.den.dtype))

    def has_linear(self, position: Int[Tensor, "#B T"]) -> Bool[Tensor, "#B T"]:
        """Return which queries read keys through the linear part; position -1 is padding."""
        exact = 0 if self.config.cache is None else self.config.cache.size
        return (self.span.lo(position) > self.span.sinks + exact) & (position >= 0)

    def query_features(
        self, inputs: AttnInputs, position: Int[Tensor, "#B T"], den: Float[Tensor, "B H T"] | None = None
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"] | None]:
        """Return phi_q, or the inputs of `kernel`; and for an exponential map the logarithm of its divisor, else None.

        `den`: sums of the weights of these features; with them, the returned features are scaled so that these sums
        become about 1 (`in_any_scale`).
        """
        assert self.feature_map is not None
        rotation = self.feature_map.config.rotation
        q = inputs.q if rotation == "before" or inputs.unrotated is None else inputs.unrotated[0]
        if self.kernel is not None:
            return self.feature_map.kernel_input(q), None
        level: Tensor | float = 0.0
        if self.in_any_scale:
            dtype = accumulation_dtype(q.dtype)
            level = -HEADROOM[dtype]
            if den is not None:
                tiny = torch.finfo(dtype).tiny
                level = torch.where(den >= tiny, level + den.clamp_min(tiny).log(), 0)
        phi_q, log_scale = self.feature_map.scaled_q(q, position, level)
        if self.delta is not None:
            phi_q = self.delta.normalize(phi_q)
        if rotation == "after" and inputs.rope is not None:
            phi_q = apply_rope(phi_q, inputs.rope)
        return phi_q if self.scale == 1 else phi_q * self.scale, log_scale

    def scaled_queries(
        self, inputs: AttnInputs, position: Int[Tensor, "#B T"], sums: Callable[[Tensor], Tensor]
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"] | None]:
        """Return `query_features`, scaled so that gradients of their sums are finite; `sums` maps features to den."""
        phi_q, log_scale = self.query_features(inputs, position)
        if self.in_any_scale and torch.is_grad_enabled():
            den = sums(phi_q)
            if self.too_small(den, position):
                return self.query_features(inputs, position, den.detach())
        return phi_q, log_scale

    def too_small(self, den: Float[Tensor, "B H T"], position: Int[Tensor, "#B T"]) -> bool:
        """Return whether any sum is so small that gradients through it may overflow.

        Features in a scale where the sums are about 1 (`in_any_scale`) avoid that.
        """
        if not (self.in_any_scale and den.requires_grad) or den.is_meta:
            return False
        assert self.feature_map is not None
        least = math.exp(HEADROOM[den.dtype]) * self.feature_map.min_denominator(den.dtype)
        return bool(((den < least) & self.has_linear(position)[:, None]).any())
