"""Feature maps as data. Their modules are in `linearize.mixers.feature_maps`."""

# Properties that depend on a field override class variables.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from linearize.base import Config, UserError
from linearize.configs.shape import LayerShape

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
    """The fields that all feature maps have.

    `signed`: the kernel phi_q.phi_k can be negative, so weights cannot be normalised by their sum. `mixed_signs`:
    unrotated features can be negative. `exponential`: features are exponentials, divided by a query's largest feature
    or the keys' running maximum. `closed_form`: the kernel is a function of one dot product, so single keys are read
    without features. `of_one_key`: a key's features depend on it alone, not on its position or other heads' keys.
    """

    rotation: Literal["before", "none"] = Field(
        default="before",
        description="before: the map sees queries and keys rotated (RoPE), as the teacher's softmax does; "
        "none: unrotated, and the linear part knows order by decay alone",
    )
    exponential: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    mixed_signs: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    of_one_key: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        """Return F, the features per head."""
        return shape.head_dim

    def key_heads(self, shape: LayerShape) -> int:
        """Return Hk, the heads of key features: H or G."""
        return shape.num_kv_heads

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        """Return the map with all sizes set; unset ones are derived from the layer's.

        Raises:
            UserError: a size that does not fit these layers.
        """
        return self


class FlatMap(FeatureMapConfig):
    """A map with one feature per input dimension, F = D, which may also be rotated after the map (SUPRA)."""

    # Wider than in the base, whose other maps cannot be rotated after the map.
    rotation: Rotation = Field(default="before", description=ROTATION)

    @property
    def signed(self) -> bool:
        return self.rotation == "after" or self.mixed_signs


class IdentityMap(FlatMap):
    """phi(x) = x (RetNet, GLA, fast decay)."""

    type: Literal["identity"] = "identity"
    mixed_signs: ClassVar[bool] = True


class SiluMap(FlatMap):
    """phi(x) = x sigmoid(x) (Gated DeltaNet)."""

    type: Literal["silu"] = "silu"
    mixed_signs: ClassVar[bool] = True


class Elu1Map(FlatMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020)."""

    type: Literal["elu1"] = "elu1"


class ReluMap(FlatMap):
    """phi(x) = relu(x)."""

    type: Literal["relu"] = "relu"


class ExpMap(FlatMap):
    """phi(x) = exp(t x) (Hedgehog sec. 3.2); keys carry their running maximum."""

    type: Literal["exp"] = "exp"
    temperature: PositiveFloat = Field(default=1.0, description="t: the higher, the spikier the attention")
    exponential: ClassVar[bool] = True


class LearnedMap(FeatureMapConfig):
    """A map after a learned projection W: D -> E, per head or one over all heads together.

    Matrices are [H, D, E] for queries, and for keys [H, D, E] (per query head) or [G, D, E] (per KV head); or, per
    model, [1, H D, H E] and [1, G D, G E]. Tied maps have only the keys' matrices: per KV head, the query heads of a
    group use their group's matrix; per model, there must be as many KV heads as query heads.
    """

    per: Literal["query_head", "kv_head", "model"] = Field(
        default="query_head",
        description="one key map per query head (the papers; a state per query head), per KV head (a state smaller by "
        "the number of query heads that share one), or one over all heads together (SUPRA's code)",
    )
    tied: bool = Field(default=False, description="queries and keys share one projection")
    bias: bool = Field(default=False, description="x W + b instead of x W")
    init: Literal["identity", "kaiming", "linear", "zero"] = Field(
        default="identity",
        description="identity: ones on each head's diagonal; kaiming: Kaiming-uniform over the whole tensor of all "
        "heads (LoLCATs' code); linear: as torch's Linear, uniform within D^-1/2; zero: zeros",
    )

    @property
    def of_one_key(self) -> bool:
        return self.per != "model"

    def outputs(self, shape: LayerShape) -> int:
        """Return E, the outputs of the projection per head."""
        return self.features(shape)

    def key_heads(self, shape: LayerShape) -> int:
        return shape.num_heads if self.per == "query_head" else shape.num_kv_heads

    def projections(self, shape: LayerShape) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes [matrices, inputs, outputs] of the query and key projections; a tied map has one."""
        width, outputs = shape.head_dim, self.outputs(shape)
        queries, keys = shape.num_heads, self.key_heads(shape)
        used = (queries, width, outputs), (keys, width, outputs)
        if self.per == "model":
            used = (1, queries * width, queries * outputs), (1, keys * width, keys * outputs)
        return used[1:] if self.tied else used

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        if self.tied and self.per == "model" and shape.num_heads != shape.num_kv_heads:
            raise UserError(
                f"mixer.feature_map.tied: one projection over all {shape.num_heads} query heads of the teacher cannot "
                f"be shared with one over all its {shape.num_kv_heads} KV heads; set tied=false, or per=kv_head"
            )
        return self


class T2RMap(LearnedMap):
    """phi(x) = relu(x W + b) (T2R, Kasai et al. 2021; SUPRA sec. 3: one W over all heads, features rotated)."""

    type: Literal["t2r"] = "t2r"
    # Wider than in the base, whose other maps cannot be rotated after the map.
    rotation: Rotation = Field(default="before", description=ROTATION)
    feature_dim: PositiveInt | None = Field(
        default=None, description="F, features per head; the head dimension if null, as it must be to be rotated after"
    )
    activation: Literal["relu", "elu1", "none"] = Field(
        default="relu",
        description="SUPRA's ablations: elu1, elu(x W + b) + 1; none, x W + b alone, whose kernel can be negative",
    )
    bias: bool = Field(default=True, description="x W + b instead of x W")
    init: Literal["identity", "kaiming", "linear"] = Field(
        default="kaiming", description="LoLCATs' T2R: kaiming; SUPRA: linear. Not zero: relu has no gradient there"
    )

    @property
    def mixed_signs(self) -> bool:
        return self.activation == "none"

    @property
    def signed(self) -> bool:
        return self.rotation == "after" or self.mixed_signs

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or shape.head_dim

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        features = self.features(shape)
        if self.rotation == "after" and features != shape.head_dim:
            raise UserError(
                f"mixer.feature_map.feature_dim: expected the teacher's head dimension, {shape.head_dim}, because "
                f"rotation is `after` the map; found {features}; set feature_dim=null"
            )
        return super().resolved(shape).model_copy(update={"feature_dim": features})


class HedgehogMap(LearnedMap):
    """phi(x) = [f(x W + b), f(-x W - b)] (Hedgehog eqs. 5-6; LoLCATs App. A: f = softmax over each half, no bias)."""

    type: Literal["hedgehog"] = "hedgehog"
    feature_dim: Even | None = Field(
        default=None, description="F, features per head, even; `expansion` times the head dimension if null"
    )
    expansion: PositiveInt = Field(
        default=1, description="F / D where feature_dim is null: 1 as in LoLCATs, 2 as in Hedgehog"
    )
    activation: Literal["softmax_halves", "softmax", "exp"] = Field(
        default="softmax_halves",
        description="softmax over each half (Hedgehog eq. 5; LoLCATs), over all features, or exponentials alone "
        "(Hedgehog eq. 6 and its listing), which keep how large a key is",
    )

    @property
    def exponential(self) -> bool:
        return self.activation == "exp"

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or self.expansion * shape.head_dim

    def outputs(self, shape: LayerShape) -> int:
        return self.features(shape) // 2

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        features = self.features(shape)
        if features % 2:
            raise UserError(
                f"mixer.feature_map.feature_dim: expected an even number; the teacher's head dimension, "
                f"{shape.head_dim}, is odd, so set one"
            )
        return super().resolved(shape).model_copy(update={"feature_dim": features})


class LolcatMap(LearnedMap):
    """phi(x) = f(x W + x): a skip connection, F = D (LOLCAT sec. 3)."""

    type: Literal["lolcat"] = "lolcat"
    activation: Literal["exp", "relu", "elu1"] = Field(default="exp", description="f; elu1 is elu(x) + 1")
    init: Literal["identity", "kaiming", "linear", "zero"] = Field(
        default="zero", description="as in every learned map; zero, the paper's, starts as f(x)"
    )

    @property
    def exponential(self) -> bool:
        return self.activation == "exp"


class ReglaMap(LearnedMap):
    """phi_q(x) = exp(x W - max over features), phi_k(x) = exp(x W - running maximum) (ReGLA eqs. 11-12)."""

    type: Literal["regla"] = "regla"
    feature_dim: PositiveInt = Field(default=64, description="F, features per head")
    exponential: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim


class PerformerMap(FeatureMapConfig):
    """phi(x) = F^-1/2 exp(W x' - |x'|^2 / 2), x' = x D^-1/4, W fixed, orthogonal blocks (Choromanski et al. 2021)."""

    type: Literal["performer"] = "performer"
    feature_dim: PositiveInt | None = Field(default=None, description="F, features per head; floor(D ln D) if null")
    exponential: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or math.floor(shape.head_dim * math.log(shape.head_dim))

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        features = self.features(shape)
        if not features:
            raise UserError(
                f"mixer.feature_map.feature_dim: expected a number, because floor(D ln D) is 0 for the teacher's head "
                f"dimension, {shape.head_dim}; set one"
            )
        return self.model_copy(update={"feature_dim": features})


class CosformerMap(FeatureMapConfig):
    """phi(x_i) = [relu(x) cos(pi i / 2M), relu(x) sin(pi i / 2M)], i the position, F = 2D (Qin et al. 2022)."""

    type: Literal["cosformer"] = "cosformer"
    rotation: Literal["none"] = Field(default="none", description="positions enter through cos and sin instead of RoPE")
    max_length: PositiveInt | None = Field(
        default=None, description="M: keys this far away weigh nothing; the model's maximum positions if null"
    )
    of_one_key: ClassVar[bool] = False

    def features(self, shape: LayerShape) -> int:
        return 2 * shape.head_dim

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        return self.model_copy(update={"max_length": self.max_length or shape.max_positions})


class TaylorMap(FeatureMapConfig):
    """phi(q).phi(k) = 1 + u + u^2 / 2 > 0, u = q.k D^-1/2; symmetric form, F = 1 + D + D (D + 1) / 2."""

    type: Literal["taylor2"] = "taylor2"
    closed_form: ClassVar[bool] = True
    mixed_signs: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        return 1 + shape.head_dim + shape.head_dim * (shape.head_dim + 1) // 2


class RfaMap(FeatureMapConfig):
    """phi(x) = (F/2)^-1/2 [sin(W x^), cos(W x^)], x^ = x / (|x| + 1e-3), W = sigma N(0, 1) (Peng et al. 2021).

    sigma is learned, one per KV head. The kernel can be negative; as in the paper, weights may still be normalised by
    their sum, with a denominator of at least 1.
    """

    type: Literal["rfa"] = "rfa"
    feature_dim: Even | None = Field(default=None, description="F, features per head, even; 2D if null")
    mixed_signs: ClassVar[bool] = True

    def features(self, shape: LayerShape) -> int:
        return self.feature_dim or 2 * shape.head_dim

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        return self.model_copy(update={"feature_dim": self.features(shape)})


class DpfpMap(FeatureMapConfig):
    """phi(x) = concat over j = 1..nu of r * roll(r, j), r = [relu(x), relu(-x)]; F = 2 D nu (Schlag et al. 2021)."""

    type: Literal["dpfp"] = "dpfp"
    nu: PositiveInt = Field(default=1, description="the paper's capacity parameter, less than 2D")

    def features(self, shape: LayerShape) -> int:
        return 2 * shape.head_dim * self.nu

    def resolved(self, shape: LayerShape) -> FeatureMapConfig:
        if self.nu >= 2 * shape.head_dim:
            raise UserError(
                f"mixer.feature_map.nu: expected less than twice the teacher's head dimension, {2 * shape.head_dim}, "
                f"from where on features repeat; found {self.nu}"
            )
        return self


# Feature maps that a recipe may name; `linearize.register_feature_map` adds to the list.
FEATURE_MAP_CONFIGS: list[type[FeatureMapConfig]] = [
    IdentityMap,
    SiluMap,
    Elu1Map,
    ReluMap,
    ExpMap,
    T2RMap,
    HedgehogMap,
    LolcatMap,
    ReglaMap,
    PerformerMap,
    CosformerMap,
    TaylorMap,
    RfaMap,
    DpfpMap,
]
