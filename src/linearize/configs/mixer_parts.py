"""Configs of a mixer's parts besides span and feature map: decay, update, normalizer, combination, KV cache.

Their modules are in `linearize.mixers`: `gates`, `update`, `normalizers`, `combine` and `eviction_cache`.
"""

# Properties that depend on a field override class variables.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from linearize.base import Config
from linearize.configs.shape import LayerShape

# --- decays -----------------------------------------------------------------------------------------------------------


BIAS_INIT = "initial bias of the gate's sigmoid: 0 forgets half with every step, 4 about 2 %"


class DecayConfig(Config):
    """Base class of the configs of decays.

    `values`: whether it acts on the value axis of the state S [F, D]. `per_feature`: whether features of a key decay
    differently. `scales_input`: whether writes are scaled by 1 - g. `constant`: whether it is equal for all tokens,
    and does not read the layer's input.
    """

    type: str
    values: ClassVar[bool] = False
    per_feature: ClassVar[bool] = False
    scales_input: ClassVar[bool] = False
    constant: ClassVar[bool] = False

    def heads(self, shape: LayerShape, key_heads: int) -> int:
        """Return Hs, the heads of the state with this decay."""
        return key_heads


class FixedDecay(DecayConfig):
    """One constant gamma_h per query head: S = gamma_h S + phi v^T, and so one state per query head.

    lightning: gamma_h = exp(-r^(h+1)), r = 2^(-8/H) (SUPRA sec. 3); retnet: gamma_h = 1 - 2^(-5-h).
    """

    type: Literal["fixed"] = "fixed"
    schedule: Literal["lightning", "retnet"] = Field(
        default="lightning", description="lightning: from 0.43 to 0.996 for 32 heads; retnet: from 0.97 to nearly 1"
    )
    constant: ClassVar[bool] = True

    def heads(self, shape: LayerShape, key_heads: int) -> int:
        return shape.num_heads


class ScalarDecay(DecayConfig):
    """g = sigmoid(w.x + b) per head: S = g S + (1 - g) phi v^T (RFA), or without the factor 1 - g."""

    type: Literal["scalar"] = "scalar"
    input_scale: bool = Field(default=True, description="scale what is written by 1 - g, as RFA does")
    bias_init: float = Field(default=0.0, description=BIAS_INIT)

    @property
    def scales_input(self) -> bool:
        return self.input_scale


class FeatureDecay(DecayConfig):
    """alpha = sigmoid(W2 W1 x + b)^(1 / temperature) per feature: S = (alpha 1^T) * S + phi v^T (GLA)."""

    type: Literal["feature"] = "feature"
    rank: PositiveInt = Field(default=16, description="rows of W1, which all heads share")
    temperature: PositiveFloat = Field(default=16.0, description="the higher, the slower it forgets")
    bias_init: float = Field(default=0.0, description="initial bias of the gate's sigmoid")
    per_feature: ClassVar[bool] = True


class OuterDecay(DecayConfig):
    """S = (sigmoid(W_f x + b_f) sigmoid(W_z x + b_z)^T) * S + phi v^T (fast decay, Mao 2022)."""

    type: Literal["outer"] = "outer"
    bias_init: float = Field(default=0.0, description=BIAS_INIT + "; both gates together forget twice that")
    values: ClassVar[bool] = True
    per_feature: ClassVar[bool] = True


class RefinedDecay(DecayConfig):
    """f = (1 - r) g^2 + r (1 - (1 - g)^2), g = sigmoid(W_g x + b_g), r = sigmoid(W_r x + b_r) (ReGLA eqs. 15-18).

    r refines g where a sigmoid saturates and gives no gradient. In the paper f gates the value axis,
    S = S * (1 f^T) + phi v^T; on the feature axis, S = (f 1^T) * S + phi v^T.
    """

    type: Literal["refined"] = "refined"
    axis: Literal["value", "feature"] = Field(default="value", description="value: as printed; feature: as in GLA")
    bias_init: float = Field(default=0.0, description="initial bias of g; that of r starts at 0")

    @property
    def values(self) -> bool:
        return self.axis == "value"

    @property
    def per_feature(self) -> bool:
        return self.axis == "feature"


Decay = FixedDecay | ScalarDecay | FeatureDecay | OuterDecay | RefinedDecay


# --- updates ----------------------------------------------------------------------------------------------------------


class AdditiveUpdate(Config):
    """S = decay * S + phi v^T: every key is added."""

    type: Literal["additive"] = "additive"


class DeltaUpdate(Config):
    """S = S + b phi (v - S^T phi)^T, b = sigmoid(w.x) per head (DeltaNet); with a decay, the gated delta rule.

    A key replaces the share b of the value that the state returns for it. Features of queries and keys are divided by
    their sum (DeltaNet) or their Euclidean norm (gated DeltaNet), so that no more than the whole value is replaced.
    """

    type: Literal["delta"] = "delta"
    key_norm: Literal["sum", "l2"] = Field(default="l2", description="what features are divided by")


Update = AdditiveUpdate | DeltaUpdate


# --- normalizers ------------------------------------------------------------------------------------------------------


class NormalizerConfig(Config):
    """Base class of the configs of normalizers. `reads_hidden`: whether it reads the layer's input."""

    type: str
    reads_hidden: ClassVar[bool] = False


class SumNormalizer(NormalizerConfig):
    """The linear part's numerator over its denominator phi_q . sum phi_k: a weighted mean of values.

    The denominator is at least 1e-6 (`rfa`: 1). That of exponential features, which have no absolute scale, has no
    lower limit.
    """

    type: Literal["sum"] = "sum"


class NoNormalizer(NormalizerConfig):
    """The linear part's numerator as it is."""

    type: Literal["none"] = "none"


class GroupNormalizer(NormalizerConfig):
    """Mean 0 and variance 1 over each head's D values per token, no affine (SUPRA sec. 3, RetNet)."""

    type: Literal["group_norm"] = "group_norm"
    eps: PositiveFloat = 1e-5


class RmsNormalizer(NormalizerConfig):
    """Mean square 1 over each head's D values per token, with a learned scale [H, D] (ReGLA's stable norm, GLA)."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: PositiveFloat = 1e-5
    output_gate: bool = Field(default=False, description="times swish(W_g x) of the hidden state (GLA)")

    @property
    def reads_hidden(self) -> bool:
        return self.output_gate


Normalizer = SumNormalizer | NoNormalizer | GroupNormalizer | RmsNormalizer


# --- combinations of window and linear part ---------------------------------------------------------------------------


class SharedDenominator(Config):
    """y = (g num_w + num_l) / (g den_w + den_l), g = sigmoid(parameter) per query head (LoLCATs eq. 7).

    A learned sink with logit s and value u is an additional key of the window, so g scales its weight too. Without a
    window it adds e^s u to num_l and e^s to den_l.
    """

    type: Literal["shared_denominator"] = "shared_denominator"
    window_factor_init: float = Field(
        default=0.1, gt=0, lt=1, description="initial g = sigmoid(parameter), per query head"
    )
    learned_sink: bool = Field(
        default=False,
        description="one more key that all queries see, in the window or, without one, in the linear part: a logit "
        "per query head, a value per KV head. A run of a language model measures both on the teacher's first tokens "
        "before training; for transfer block by block they start at 0",
    )


class AbsoluteScale(Config):
    """Window and linear part in one scale: y = (num_w + e^(l - c) num_l) / (den_w + e^(l - c) den_l).

    c is the largest logit in the window, l the log scale of the exponential features plus a learned offset per query
    head. So all keys are weighted on one scale, as softmax does. With SharedDenominator, the linear part learns its
    scale.
    """

    type: Literal["absolute_scale"] = "absolute_scale"
    offset_init: float = Field(
        default=0.0, description="initial offset, where attention transfer does not calibrate it (calibration_tokens)"
    )


class Mix(Config):
    """y = s window + (1 - s) linear, s = sigmoid(parameter) per query head, 1 without linear keys (LOLCAT eq. 8)."""

    type: Literal["mix"] = "mix"
    window_weight_init: float = Field(default=0.5, gt=0, lt=1, description="initial s")


class Add(Config):
    """y = window + linear, each normalised by itself; without a window, the linear part alone."""

    type: Literal["add"] = "add"


class WindowOnly(Config):
    """Softmax over the span, without a linear part.

    With a learned sink, y = (num_w + e^s u) / (den_w + e^s): a key for all queries, with a logit s per query head and
    a value u per KV head. In gpt-oss and Granite SWA, u is 0.
    """

    type: Literal["window_only"] = "window_only"
    learned_sink: bool = Field(
        default=False, description="one more key that all queries see: a logit per query head, a value per KV head"
    )


Combine = SharedDenominator | AbsoluteScale | Mix | Add | WindowOnly


# --- KV cache with eviction -------------------------------------------------------------------------------------------


class EvictionCache(Config):
    """C key-value pairs per KV head that have left the window: those with the highest eviction scores.

    A cache can have two parts with separate scores. The first keeps `recall_size` pairs of all, the second chooses from
    the pairs that the first does not keep. Evicted pairs are written to the linear state; without a linear part they
    are lost.
    """

    size: PositiveInt = Field(description="pairs per KV head")
    recall_size: int = Field(default=0, ge=0, description="of these, pairs with the highest scores for recall")

    @model_validator(mode="after")
    def _two_parts(self) -> EvictionCache:
        if self.recall_size >= self.size:
            raise ValueError(f"cache: expected recall_size below size ({self.size}), found {self.recall_size}")
        return self

    @property
    def parts(self) -> tuple[slice, ...]:
        """Return the slots of each part, in the order of the scores; the first part has the last slots."""
        text = self.size - self.recall_size
        return (slice(text, self.size), slice(0, text)) if self.recall_size else (slice(0, text),)
