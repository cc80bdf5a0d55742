"""The parts of a mixer, as data: span, feature map, decay, update, normalizer, combination.

A `MixerConfig` names one of each; combinations without meaning are refused when it is read, with the reason. Each part
knows its own sizes, so that plans need no weights: H query heads, G KV heads, Hk heads of key features, Hs heads of the
state S [F, D], D head dimension, F features per head. Feature maps stand in `maps`, decay and update in `updates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from linearize.base import Config
from linearize.mixers.maps import (
    CosformerMap,
    DpfpMap,
    Elu1Map,
    ExpMap,
    HedgehogMap,
    IdentityMap,
    LolcatMap,
    PerformerMap,
    ReglaMap,
    ReluMap,
    RfaMap,
    T2RMap,
    TaylorMap,
)
from linearize.mixers.maps import FeatureMapPart as FeatureMapPart
from linearize.mixers.maps import LearnedMap as LearnedMap
from linearize.mixers.shape import LayerShape
from linearize.mixers.updates import (
    AdditiveUpdate,
    DeltaUpdate,
    FeatureGate,
    FixedDecay,
    OuterGate,
    RefinedGate,
    ScalarGate,
)
from linearize.mixers.updates import DecayPart as DecayPart
from linearize.ops import NoSpan, SlidingSpan, TerracedSpan

# --- normalizer -------------------------------------------------------------------------------------------------------


class NormalizerPart(Config):
    """What every normalizer says of itself. `reads_hidden`: whether it reads the layer's input."""

    @property
    def reads_hidden(self) -> bool:
        return False

    def parameters(self, shape: LayerShape) -> int:
        """Trainable numbers in one layer."""
        return 0


class SumNormalizer(NormalizerPart):
    """The linear part's numerator over its denominator phi_q . sum phi_k, at least 1e-6: a weighted mean of values."""

    type: Literal["sum"] = "sum"


class NoNormalizer(NormalizerPart):
    """The linear part's numerator as it is."""

    type: Literal["none"] = "none"


class GroupNormalizer(NormalizerPart):
    """Mean 0 and variance 1 over each head's D values per token, no affine (SUPRA's and RetNet's group norm)."""

    type: Literal["group_norm"] = "group_norm"
    eps: PositiveFloat = 1e-5


class RmsNormalizer(NormalizerPart):
    """Mean square 1 over each head's D values per token, with a learned scale [H, D] (ReGLA's stable norm, GLA)."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: PositiveFloat = 1e-5
    output_gate: bool = Field(default=False, description="times swish(W_g x) of the hidden state (GLA)")

    @property
    def reads_hidden(self) -> bool:
        return self.output_gate

    def parameters(self, shape: LayerShape) -> int:
        return shape.num_heads * shape.head_dim * (1 + (shape.hidden_size if self.output_gate else 0))


# --- combination ------------------------------------------------------------------------------------------------------


class CombinePart(Config):
    """What every combination says of itself."""

    def parameters(self, shape: LayerShape) -> int:
        """Trainable numbers in one layer."""
        return 0


class SharedDenominator(CombinePart):
    """LoLCATs eq. 7: one denominator for the window, weighted by a learned factor g per head, and the linear part."""

    type: Literal["shared_denominator"] = "shared_denominator"
    window_factor_init: float = Field(
        default=0.1, gt=0, lt=1, description="initial g = sigmoid(parameter), per query head"
    )

    def parameters(self, shape: LayerShape) -> int:
        return shape.num_heads


class Mix(CombinePart):
    """y = s window + (1 - s) linear, s = sigmoid(parameter) per query head, 1 without linear keys (LOLCAT eq. 8)."""

    type: Literal["mix"] = "mix"
    window_weight_init: float = Field(default=0.5, gt=0, lt=1, description="initial s")

    @model_validator(mode="before")
    @classmethod
    def _without_weights_over(cls, fields: Any) -> Any:
        """Old recipes and checkpoints say over which keys the linear part's weights sum to 1: its own, as they do."""
        if not isinstance(fields, dict) or "weights_over" not in fields:
            return fields
        if fields["weights_over"] != "linear_keys":
            raise ValueError(
                f"weights_over: expected linear_keys, as it is without this field, found {fields['weights_over']}, "
                "which is gone; convert and train anew without it"
            )
        return {name: value for name, value in fields.items() if name != "weights_over"}

    def parameters(self, shape: LayerShape) -> int:
        return shape.num_heads


class Add(CombinePart):
    """y = window + linear, each normalised by itself; without a window, the linear part alone."""

    type: Literal["add"] = "add"


class AbsoluteScale(CombinePart):
    """Window and linear part in one scale: y = (num_w + e^(l - c) num_l) / (den_w + e^(l - c) den_l).

    c is the largest logit in the window, l the logarithm that exponential features are given relative to, plus a
    learned offset per query head: far keys can count as much as near ones, as in softmax, and as little. Where
    SharedDenominator's linear part has to learn what the window's weights are relative to, this one knows.
    """

    type: Literal["absolute_scale"] = "absolute_scale"
    offset_init: float = Field(
        default=0.0, description="initial offset, where attention transfer does not calibrate it (calibration_tokens)"
    )

    def parameters(self, shape: LayerShape) -> int:
        return shape.num_heads


class WindowOnly(CombinePart):
    """The control without a linear part: softmax over the span, nothing else."""

    type: Literal["window_only"] = "window_only"


# --- the mixer --------------------------------------------------------------------------------------------------------

FeatureMap = Annotated[
    IdentityMap
    | Elu1Map
    | ReluMap
    | ExpMap
    | T2RMap
    | HedgehogMap
    | LolcatMap
    | ReglaMap
    | PerformerMap
    | CosformerMap
    | TaylorMap
    | RfaMap
    | DpfpMap,
    Field(discriminator="type"),
]
Decay = Annotated[FixedDecay | ScalarGate | FeatureGate | OuterGate | RefinedGate, Field(discriminator="type")]
Update = Annotated[AdditiveUpdate | DeltaUpdate, Field(discriminator="type")]
Normalizer = Annotated[SumNormalizer | NoNormalizer | GroupNormalizer | RmsNormalizer, Field(discriminator="type")]
Combine = Annotated[SharedDenominator | AbsoluteScale | Mix | Add | WindowOnly, Field(discriminator="type")]


class MixerConfig(Config):
    """One layer's token mixer, complete: everything that is needed to rebuild it.

    `span` splits the keys of a query: softmax over the near ones, linear attention over the others. Of these the state
    S [F, D] is kept, S = decay * S + phi(k) v^T (or the delta rule), and read as phi(q)^T S. `normalizer` makes the
    linear part's output of what is read, and `combine` the layer's, from the linear part and the window.
    """

    span: NoSpan | SlidingSpan | TerracedSpan = Field(
        default=SlidingSpan(), discriminator="type", description="which keys are softmax keys"
    )
    feature_map: FeatureMap | None = Field(
        default=HedgehogMap(), description="phi; null where there is no linear part (combine `window_only`)"
    )
    decay: Decay | None = Field(default=None, description="how the state forgets with every step; null: it does not")
    update: Update = Field(default=AdditiveUpdate(), description="how a key and its value are written to the state")
    scale: Literal["none", "head_dim", "regla"] = Field(
        default="none",
        description="phi_q.phi_k as it is, times D^-1/2 (head_dim), or times 1 / (e sqrt(F (e^2 - 1))) (regla, "
        "Theorem 3.1: variance 1 for normal q and k)",
    )
    normalizer: Normalizer = Field(default=SumNormalizer(), description="what is made of the linear part's sums")
    combine: Combine = Field(default=SharedDenominator(), description="how window and linear part become one output")

    @model_validator(mode="after")
    def _meaningful(self) -> MixerConfig:
        for without_meaning, reason in _REFUSED:
            if without_meaning(self):
                raise ValueError(reason)
        return self

    @property
    def sums(self) -> bool:
        """Whether weights are divided by their sum, so that they must not be negative."""
        return isinstance(self.normalizer, SumNormalizer)

    @property
    def keeps_maximum(self) -> bool:
        """Whether keys' exponentials carry their running maximum; the delta rule's are normalised one by one."""
        return (
            self.feature_map is not None and self.feature_map.exponential and not isinstance(self.update, DeltaUpdate)
        )

    @property
    def in_closed_form(self) -> bool:
        """Whether a causal mixer reads single keys by the map's kernel; else its features are changed on the way."""
        as_they_are = self.decay is None and not isinstance(self.update, DeltaUpdate) and self.scale == "none"
        return self.feature_map is not None and self.feature_map.closed_form and as_they_are

    @property
    def absolute(self) -> bool:
        """Whether the linear part keeps the logarithm that its features are relative to."""
        return isinstance(self.combine, AbsoluteScale)

    @property
    def reads_hidden(self) -> bool:
        """Whether any part reads the layer's input."""
        learned_decay = self.decay is not None and not self.decay.constant
        return learned_decay or isinstance(self.update, DeltaUpdate) or self.normalizer.reads_hidden

    @property
    def reads_unrotated(self) -> bool:
        """Whether the map sees queries and keys as they are before RoPE."""
        return self.feature_map is not None and self.feature_map.rotation != "before"

    def state_heads(self, shape: LayerShape) -> int:
        """Hs: heads of the linear part's state; 0 where there is none."""
        if self.feature_map is None:
            return 0
        key_heads = self.feature_map.key_heads(shape)
        return key_heads if self.decay is None else self.decay.heads(shape, key_heads)

    @property
    def needs_order(self) -> str | None:
        """Which part only a causal mixer can have, what an encoder's must be, and why; None: there is none."""
        without_window = isinstance(self.combine, Add | SharedDenominator)  # where both are the linear part alone
        for field, expected, allowed, found in (
            ("span", "`none`", isinstance(self.span, NoSpan), self.span),
            ("decay", "null", self.decay is None, self.decay),
            ("update", "`additive`", isinstance(self.update, AdditiveUpdate), self.update),
            ("combine", "`add` or `shared_denominator`", without_window, self.combine),
        ):
            if not allowed:
                return (
                    f"{field}: expected {expected}, because an encoder's linear attention sums over all tokens alike, "
                    f"before and after; found `{getattr(found, 'type', found)}`"
                )
        return None

    def resolved(self, shape: LayerShape) -> MixerConfig:
        """The mixer with every size filled in that may be left to the teacher.

        Raises:
            UserError: a size that makes no sense for these layers.
        """
        if self.feature_map is None:
            return self
        return self.model_copy(update={"feature_map": self.feature_map.resolved(shape)})


LayerPlan = tuple[MixerConfig | None, ...]  # of each layer its mixer; None: it stays softmax


def _has_linear_fields(mixer: MixerConfig) -> bool:
    plain = isinstance(mixer.update, AdditiveUpdate) and mixer.scale == "none" and mixer.sums
    return mixer.decay is not None or not plain


# What makes a combination meaningless, and what the reader of the recipe is told.
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
