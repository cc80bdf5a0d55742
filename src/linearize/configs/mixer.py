"""The config of a mixer, which names its parts; combinations of parts without meaning are refused with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Annotated, Any, Literal, cast

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from linearize.base import Config
from linearize.configs.feature_maps import FEATURE_MAP_CONFIGS, FeatureMapConfig, HedgehogMap, RfaMap
from linearize.configs.mixer_parts import (
    AbsoluteScale,
    Add,
    AdditiveUpdate,
    Combine,
    Decay,
    DeltaUpdate,
    EvictionCache,
    Mix,
    Normalizer,
    SharedDenominator,
    SumNormalizer,
    Update,
    WindowOnly,
)
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, Span, TerracedSpan


class _AnyFeatureMap:
    """For pydantic: any of the registered feature maps (`table`), distinguished by their `type`."""

    table = FEATURE_MAP_CONFIGS  # scripts/write_reference.py reads it too

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        any_map: Any = reduce(lambda one, other: one | other, cast(list[Any], cls.table))
        return handler.generate_schema(Annotated[any_map, Field(discriminator="type")])


SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda head_dim, features: 1.0,
    "head_dim": lambda head_dim, features: head_dim**-0.5,
    "regla": lambda head_dim, features: 1 / (math.e * math.sqrt(features * (math.e**2 - 1))),
}


class MixerConfig(Config):
    """The token mixer of one layer, with everything that is needed to rebuild it.

    `span` splits the keys of a query: softmax over the near ones, linear attention over the others. The linear part
    keeps the state S [F, D], S = decay * S + phi(k) v^T (or the delta rule), and reads phi(q)^T S. `normalizer` turns
    this into the linear part's output, and `combine` merges linear part and window into the layer's output.
    """

    span: Span = Field(default=SlidingSpan(), discriminator="type", description="which keys are softmax keys")
    feature_map: Annotated[FeatureMapConfig, _AnyFeatureMap] | None = Field(
        default=HedgehogMap(), description="phi; null where there is no linear part (combine `window_only`)"
    )
    decay: Decay | None = Field(
        default=None, discriminator="type", description="how the state decays with every step; null: no decay"
    )
    update: Update = Field(
        default=AdditiveUpdate(), discriminator="type", description="how a key and its value are written to the state"
    )
    scale: Literal["none", "head_dim", "regla"] = Field(
        default="none",
        description="phi_q.phi_k unscaled, times D^-1/2 (head_dim), or times 1 / (e sqrt(F (e^2 - 1))) (regla, "
        "Theorem 3.1: variance 1 for normal q and k)",
    )
    normalizer: Normalizer = Field(
        default=SumNormalizer(), discriminator="type", description="how the linear part's sums are normalised"
    )
    cache: EvictionCache | None = Field(
        default=None, description="KV cache with eviction, in addition to the window; null: none. Needs a terraced span"
    )
    combine: Combine = Field(
        default=SharedDenominator(), discriminator="type", description="how window and linear part become one output"
    )
    state_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="dtype of S between calls; null: float32, in which it is computed"
    )

    @model_validator(mode="after")
    def _meaningful(self) -> MixerConfig:
        for without_meaning, reason in _REFUSED:
            if without_meaning(self):
                raise ValueError(reason)
        return self

    @property
    def sums(self) -> bool:
        """Return whether weights are divided by their sum, so that they must not be negative."""
        return isinstance(self.normalizer, SumNormalizer)

    @property
    def any_scale(self) -> bool:
        """Return whether a factor of a query's features cancels: weights have a sum of 1, or known scales."""
        if not isinstance(self.combine, SharedDenominator):
            return self.sums
        return self.sums and isinstance(self.span, NoSpan) and not self.learned_sink

    @property
    def keeps_maximum(self) -> bool:
        """Return whether keys' exponentials carry a running maximum; the delta rule normalises each key by itself."""
        return (
            self.feature_map is not None and self.feature_map.exponential and not isinstance(self.update, DeltaUpdate)
        )

    @property
    def uses_kernel(self) -> bool:
        """Return whether a causal mixer reads single keys by the map's kernel; not if their features are modified."""
        unmodified = self.decay is None and not isinstance(self.update, DeltaUpdate) and self.scale == "none"
        has_kernel = self.feature_map is not None and self.feature_map.closed_form
        return has_kernel and unmodified and self.cache is None  # a cache leaves slots of the state empty

    @property
    def absolute(self) -> bool:
        """Return whether the linear part keeps the log scale that its features are relative to."""
        return isinstance(self.combine, AbsoluteScale)

    @property
    def learned_sink(self) -> bool:
        """Return whether there is an additional learned key, in the window or, without one, in the linear part."""
        return isinstance(self.combine, WindowOnly | SharedDenominator) and self.combine.learned_sink

    @property
    def reads_hidden(self) -> bool:
        """Return whether any part reads the layer's input."""
        learned_decay = self.decay is not None and not self.decay.constant
        return learned_decay or isinstance(self.update, DeltaUpdate) or self.normalizer.reads_hidden

    @property
    def maps_unrotated(self) -> bool:
        """Return whether the feature map reads queries and keys before RoPE."""
        return self.feature_map is not None and self.feature_map.rotation != "before"

    @property
    def reads_unrotated(self) -> bool:
        """Return whether any part reads queries or keys before RoPE: the feature map, or eviction scores."""
        return self.maps_unrotated or self.cache is not None

    def scale_factor(self, shape: LayerShape) -> float:
        """Return the factor of phi_q.phi_k (`scale`); the mixer must have a feature map."""
        assert self.feature_map is not None
        return SCALES[self.scale](shape.head_dim, self.feature_map.features(shape))

    def state_heads(self, shape: LayerShape) -> int:
        """Return Hs, the heads of the linear part's state; 0 without a linear part."""
        if self.feature_map is None:
            return 0
        key_heads = self.feature_map.key_heads(shape)
        return key_heads if self.decay is None else self.decay.heads(shape, key_heads)

    @property
    def encoder_error(self) -> str | None:
        """Return an error message about a part that an encoder's mixer cannot have; None if all parts are allowed."""
        without_window = isinstance(self.combine, Add | SharedDenominator)  # where both are the linear part alone
        for field, expected, allowed, value in (
            ("span", "`none`", isinstance(self.span, NoSpan), self.span),
            ("decay", "null", self.decay is None, self.decay),
            ("update", "`additive`", isinstance(self.update, AdditiveUpdate), self.update),
            ("combine", "`add` or `shared_denominator`", without_window, self.combine),
            ("combine.learned_sink", "false", not self.learned_sink, "true"),
        ):
            if not allowed:
                return (
                    f"{field}: expected {expected}, because an encoder's linear attention sums over all tokens, "
                    f"before and after; found `{getattr(value, 'type', value)}`"
                )
        return None

    def resolved(self, shape: LayerShape) -> MixerConfig:
        """Return the mixer with all sizes set; unset ones are derived from the layer's.

        Raises:
            UserError: a size that does not fit these layers.
        """
        if self.feature_map is None:
            return self
        return self.model_copy(update={"feature_map": self.feature_map.resolved(shape)})


class HeadGroup(Config):
    """Some KV heads of a layer, with the query heads that read them, and their mixer; null: softmax over all keys."""

    kv_heads: tuple[int, ...] = Field(min_length=1)
    mixer: MixerConfig | None = None


class HeadwiseConfig(Config):
    """A layer whose KV heads have mixers of different kinds or sizes. Each KV head is in one group."""

    groups: tuple[HeadGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _partition(self) -> HeadwiseConfig:
        heads = sorted(head for group in self.groups for head in group.kv_heads)
        if heads != list(range(len(heads))) or any(list(g.kv_heads) != sorted(g.kv_heads) for g in self.groups):
            raise ValueError(f"groups: expected each KV head from 0 on in one group, in order, found {heads}")
        return self

    @classmethod
    def of(cls, mixers: Sequence[MixerConfig | None]) -> MixerConfig | HeadwiseConfig | None:
        """Return the config of a layer with these mixers, one per KV head; heads with the same mixer are one group."""
        different = list(dict.fromkeys(mixers))
        if len(different) == 1:
            return different[0]
        groups = (
            HeadGroup(kv_heads=tuple(head for head, its in enumerate(mixers) if its == mixer), mixer=mixer)
            for mixer in different
        )
        return cls(groups=tuple(groups))

    def each(self, change: Callable[[MixerConfig], MixerConfig]) -> HeadwiseConfig:
        """Return the same heads with their mixers changed by `change`; softmax stays."""
        groups = (g.model_copy(update={"mixer": g.mixer and change(g.mixer)}) for g in self.groups)
        return HeadwiseConfig(groups=tuple(groups))

    @property
    def mixers(self) -> list[MixerConfig]:
        """Return the mixers of all groups that do not stay softmax."""
        return [group.mixer for group in self.groups if group.mixer is not None]


LayerPlan = tuple[MixerConfig | HeadwiseConfig | None, ...]  # the mixer of each layer; None: the layer stays softmax


def each_mixer(plan: LayerPlan) -> Iterator[MixerConfig]:
    """Yield all mixers of a plan, layer by layer."""
    for layer in plan:
        yield from layer.mixers if isinstance(layer, HeadwiseConfig) else () if layer is None else (layer,)


def is_constant(plan: LayerPlan) -> bool:
    """Return whether the state has constant size: no layer and no head of the plan keeps softmax over all keys."""
    return all(
        all(group.mixer is not None for group in layer.groups)
        if isinstance(layer, HeadwiseConfig)
        else layer is not None
        for layer in plan
    )


def is_spread(plan: LayerPlan) -> bool:
    """Return whether heads of a layer have different mixers, or a mixer has a KV cache with eviction."""
    return any(isinstance(layer, HeadwiseConfig) for layer in plan) or any(
        mixer.cache is not None for mixer in each_mixer(plan)
    )


def _has_linear_fields(mixer: MixerConfig) -> bool:
    plain = isinstance(mixer.update, AdditiveUpdate) and mixer.scale == "none" and mixer.sums
    return mixer.decay is not None or not plain


# Tests for combinations without meaning, and the error message of each.
_REFUSED: tuple[tuple[Callable[[MixerConfig], bool], str], ...] = (
    (
        lambda m: (m.feature_map is None) != isinstance(m.combine, WindowOnly),
        "combine `window_only` and feature_map null go together: it has no linear part to map for",
    ),
    (
        lambda m: isinstance(m.combine, WindowOnly) and _has_linear_fields(m),
        "combine `window_only` has no linear part: decay must be null, update `additive`, scale `none` and "
        "normalizer `sum`",
    ),
    (
        lambda m: isinstance(m.combine, WindowOnly | Mix | AbsoluteScale) and isinstance(m.span, NoSpan),
        "combine `window_only`, `mix` and `absolute_scale` need a window: choose span `sliding` or `terraced`",
    ),
    (
        lambda m: m.cache is not None and not isinstance(m.span, TerracedSpan),
        "cache: keys are chosen when a block of them leaves the window: choose span `terraced`",
    ),
    (
        lambda m: m.cache is not None and m.feature_map is not None and not m.feature_map.of_one_key,
        "cache: each head keeps keys of its own and maps them only when it drops them, and this feature map reads the "
        "keys of all heads, or positions: choose feature_map.per `kv_head` or `query_head`, and no `cosformer`",
    ),
    (
        lambda m: m.state_dtype is not None and m.feature_map is None,
        "state_dtype is that of the linear part's state, and there is none: set it to null",
    ),
    (
        lambda m: isinstance(m.combine, SharedDenominator | AbsoluteScale) and not m.sums,
        "combine `shared_denominator` and `absolute_scale` divide by the sum of all weights: choose normalizer `sum`, "
        "or combine `add` or `mix`",
    ),
    (
        lambda m: isinstance(m.combine, SharedDenominator) and isinstance(m.feature_map, RfaMap),
        "combine `shared_denominator` adds the weights of window and linear part, and those of feature_map `rfa` can "
        "be negative: choose combine `add` or `mix`",
    ),
    (
        lambda m: m.absolute and (m.feature_map is None or not m.feature_map.exponential),
        "combine `absolute_scale` needs a map whose features are exponentials, which keep how large a key is: choose "
        "feature_map `exp`, `performer`, `regla`, or activation `exp` of `hedgehog` or `lolcat`",
    ),
    (
        lambda m: m.sums and m.feature_map is not None and m.feature_map.signed,
        "normalizer `sum` needs weights phi_q.phi_k that are never negative, and this feature map's can be: "
        "choose `group_norm`, `rms_norm` or `none` (with combine `add` or `mix`), or another map or rotation",
    ),
    (
        lambda m: m.sums and m.decay is not None and m.decay.values,
        "normalizer `sum` divides all values of a token by one number, but this decay weighs each value differently: "
        "choose `group_norm`, `rms_norm` or `none` (with combine `add` or `mix`)",
    ),
    (
        lambda m: m.sums and isinstance(m.update, DeltaUpdate),
        "normalizer `sum` divides by a sum of keys, but the delta rule replaces values instead of summing them: "
        "choose `group_norm`, `rms_norm` or `none` (with combine `add` or `mix`)",
    ),
    (
        lambda m: isinstance(m.update, DeltaUpdate) and m.decay is not None and m.decay.values,
        "update `delta` with a decay on the value axis has no chunked form, since each value would need a key of its "
        "own: choose a decay per head or on the feature axis",
    ),
    (
        lambda m: isinstance(m.update, DeltaUpdate) and m.decay is not None and m.decay.scales_input,
        "update `delta` has a write strength of its own: set decay.input_scale to false",
    ),
    (
        lambda m: (
            isinstance(m.update, DeltaUpdate)
            and m.update.key_norm == "sum"
            and m.feature_map is not None
            and m.feature_map.mixed_signs
        ),
        "update.key_norm `sum` divides by the sum of a key's features, which this map's can make zero: choose `l2`",
    ),
)
