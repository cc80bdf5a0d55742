"""How the state S [F, D] of linear attention changes from step to step: what it forgets, and how a key is written.

As data; each part knows its own sizes. Hs heads of the state, D head dimension, F features per head, x the layer's
hidden state.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from linearize.base import Config
from linearize.mixers.shape import LayerShape

# --- decay ------------------------------------------------------------------------------------------------------------

BIAS_INIT = "initial bias of the gate's sigmoid: 0 forgets half with every step, 4 about 2 %"


class DecayPart(Config):
    """What every decay says of itself.

    `values`: whether it acts on the value axis of the state S [F, D]. `scales_input`: whether what is written is scaled
    by 1 - g. `constant`: whether it is the same for every token, and does not read the layer's input.
    """

    @property
    def values(self) -> bool:
        return False

    @property
    def scales_input(self) -> bool:
        return False

    @property
    def constant(self) -> bool:
        return False

    def heads(self, shape: LayerShape, key_heads: int) -> int:
        """Hs: heads of the state under this decay."""
        return key_heads

    def key_width(self, features: int) -> int:
        """Numbers per step and head on the feature axis: F, 1 for a scalar, 0 for none."""
        return 1

    def parameters(self, shape: LayerShape, heads: int, features: int) -> int:
        """Trainable numbers in one layer, for `heads` states with `features` features."""
        return 0


class FixedDecay(DecayPart):
    """One constant gamma_h per query head: S = gamma_h S + phi v^T, and so one state per query head.

    lightning: gamma_h = exp(-r^(h+1)), r = 2^(-8/H) (SUPRA); retnet: gamma_h = 1 - 2^(-5-h).
    """

    type: Literal["fixed"] = "fixed"
    schedule: Literal["lightning", "retnet"] = Field(
        default="lightning", description="lightning: from 0.43 to 0.996 for 32 heads; retnet: from 0.97 to nearly 1"
    )

    @property
    def constant(self) -> bool:
        return True

    def heads(self, shape: LayerShape, key_heads: int) -> int:
        return shape.num_heads


class ScalarGate(DecayPart):
    """g = sigmoid(w.x + b) per head: S = g S + (1 - g) phi v^T (RFA), or without the factor 1 - g."""

    type: Literal["scalar"] = "scalar"
    input_scale: bool = Field(default=True, description="scale what is written by 1 - g, as RFA does")
    bias_init: float = Field(default=0.0, description=BIAS_INIT)

    @property
    def scales_input(self) -> bool:
        return self.input_scale

    def parameters(self, shape: LayerShape, heads: int, features: int) -> int:
        return heads * (shape.hidden_size + 1)


class FeatureGate(DecayPart):
    """alpha = sigmoid(W2 W1 x + b)^(1 / temperature) per feature: S = (alpha 1^T) * S + phi v^T (GLA)."""

    type: Literal["feature"] = "feature"
    rank: PositiveInt = Field(default=16, description="rows of W1, which all heads share")
    temperature: PositiveFloat = Field(default=16.0, description="the higher, the slower it forgets")
    bias_init: float = Field(default=0.0, description="initial bias of the gate's sigmoid")

    def key_width(self, features: int) -> int:
        return features

    def parameters(self, shape: LayerShape, heads: int, features: int) -> int:
        return self.rank * shape.hidden_size + heads * features * (self.rank + 1)


class OuterGate(DecayPart):
    """S = (sigmoid(W_f x + b_f) sigmoid(W_z x + b_z)^T) * S + phi v^T (fast decay, Mao 2022)."""

    type: Literal["outer"] = "outer"
    bias_init: float = Field(default=0.0, description=BIAS_INIT + "; both gates together forget twice that")

    @property
    def values(self) -> bool:
        return True

    def key_width(self, features: int) -> int:
        return features

    def parameters(self, shape: LayerShape, heads: int, features: int) -> int:
        return heads * (features + shape.head_dim) * (shape.hidden_size + 1)


class RefinedGate(DecayPart):
    """f = (1 - r) g^2 + r (1 - (1 - g)^2), g and r sigmoids of the hidden state (ReGLA eqs. 15-18).

    r refines g where a sigmoid saturates and gives no gradient. As printed f gates the value axis,
    S = S * (1 f^T) + phi v^T; on the feature axis, S = (f 1^T) * S + phi v^T.
    """

    type: Literal["refined"] = "refined"
    axis: Literal["value", "feature"] = Field(default="value", description="value: as printed; feature: as in GLA")
    bias_init: float = Field(default=0.0, description="initial bias of g; that of r starts at 0")

    @property
    def values(self) -> bool:
        return self.axis == "value"

    def key_width(self, features: int) -> int:
        return 0 if self.values else features

    def parameters(self, shape: LayerShape, heads: int, features: int) -> int:
        width = shape.head_dim if self.values else features
        return 2 * heads * width * (shape.hidden_size + 1)


# --- update -----------------------------------------------------------------------------------------------------------


class AdditiveUpdate(Config):
    """S = decay * S + phi v^T: every key is added."""

    type: Literal["additive"] = "additive"

    def parameters(self, shape: LayerShape, heads: int) -> int:
        return 0


class DeltaUpdate(Config):
    """S = S + b phi (v - S^T phi)^T, b = sigmoid(w.x) per head (DeltaNet); with a decay, the gated delta rule.

    A key replaces what the state recalls for it, by the share b. So that this share is no more than all of it, queries'
    and keys' features are divided by their sum (DeltaNet) or their Euclidean norm (gated DeltaNet).
    """

    type: Literal["delta"] = "delta"
    key_norm: Literal["sum", "l2"] = Field(default="l2", description="what features are divided by")

    def parameters(self, shape: LayerShape, heads: int) -> int:
        return heads * shape.hidden_size
