"""Mixers drawn from the whole space of parts, with inputs for them: what the property test is made of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import (
    AbsoluteScale,
    Add,
    AdditiveUpdate,
    DeltaUpdate,
    EvictionCache,
    FeatureDecay,
    FixedDecay,
    GroupNormalizer,
    Mix,
    NoNormalizer,
    OuterDecay,
    RefinedDecay,
    RmsNormalizer,
    ScalarDecay,
    SharedDenominator,
    SumNormalizer,
)
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.mixers import feature_maps as maps
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.inputs import AttnInputs, apply_rope
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import SequenceLayout
from tests.ops.cases import STYLES, documents_of, own_layout
from tests.oracles.attention import Documents

PER = st.sampled_from(["query_head", "kv_head", "model"])
ROTATIONS = st.sampled_from(["before", "none", "after"])
BEFORE_OR_NONE = st.sampled_from(["before", "none"])
LEARNED = {"per": PER, "tied": st.booleans(), "bias": st.booleans()}
EVEN = st.sampled_from([2, 4, 6])

MAPS = st.one_of(
    st.builds(maps.IdentityMap, rotation=ROTATIONS),
    st.builds(maps.SiluMap, rotation=ROTATIONS),
    st.builds(maps.Elu1Map, rotation=ROTATIONS),
    st.builds(maps.ReluMap, rotation=ROTATIONS),
    st.builds(maps.ExpMap, rotation=ROTATIONS, temperature=st.sampled_from([1.0, 2.0])),
    st.builds(
        maps.T2RMap,
        **LEARNED,
        rotation=BEFORE_OR_NONE,
        feature_dim=EVEN,
        activation=st.sampled_from(["relu", "elu1", "none"]),
    ),
    st.builds(maps.T2RMap, **LEARNED, rotation=st.just("after")),
    st.builds(
        maps.HedgehogMap,
        **LEARNED,
        rotation=BEFORE_OR_NONE,
        feature_dim=EVEN,
        activation=st.sampled_from(["softmax_halves", "softmax", "exp"]),
    ),
    st.builds(maps.LolcatMap, **LEARNED, rotation=BEFORE_OR_NONE, activation=st.sampled_from(["exp", "relu", "elu1"])),
    st.builds(maps.ReglaMap, **LEARNED, rotation=BEFORE_OR_NONE, feature_dim=st.integers(1, 6)),
    st.builds(maps.PerformerMap, rotation=BEFORE_OR_NONE),
    st.builds(maps.CosformerMap, max_length=st.just(256)),
    st.builds(maps.TaylorMap, rotation=BEFORE_OR_NONE),
    st.builds(maps.RfaMap, rotation=BEFORE_OR_NONE),
    st.builds(maps.DpfpMap, rotation=BEFORE_OR_NONE, nu=st.integers(1, 2)),
)
EXPONENTIAL_MAPS = st.one_of(
    st.builds(maps.ExpMap, rotation=BEFORE_OR_NONE, temperature=st.sampled_from([1.0, 2.0])),
    st.builds(maps.HedgehogMap, **LEARNED, rotation=BEFORE_OR_NONE, feature_dim=EVEN, activation=st.just("exp")),
    st.builds(maps.LolcatMap, **LEARNED, rotation=BEFORE_OR_NONE, activation=st.just("exp")),
    st.builds(maps.ReglaMap, **LEARNED, rotation=BEFORE_OR_NONE, feature_dim=st.integers(1, 6)),
    st.builds(maps.PerformerMap, rotation=BEFORE_OR_NONE),
)
SPANS = st.one_of(
    st.builds(NoSpan),
    st.builds(SlidingSpan, window_size=st.sampled_from([1, 3, 7, 16, 17, 40]), sinks=st.sampled_from([0, 0, 2, 5])),
    st.builds(
        TerracedSpan,
        window_size=st.sampled_from([1, 4, 7, 16]),
        blocks=st.integers(1, 2),
        sinks=st.sampled_from([0, 0, 1, 9]),
    ),
)
BIAS = st.sampled_from([0.0, 3.0, -3.0])
DECAYS = st.one_of(
    st.none(),
    st.builds(FixedDecay, schedule=st.sampled_from(["lightning", "retnet"])),
    st.builds(ScalarDecay, input_scale=st.booleans(), bias_init=BIAS),
    st.builds(FeatureDecay, rank=st.integers(1, 3), temperature=st.sampled_from([1.0, 16.0]), bias_init=BIAS),
    st.builds(OuterDecay, bias_init=BIAS),
    st.builds(RefinedDecay, axis=st.sampled_from(["value", "feature"]), bias_init=BIAS),
)
UPDATES = st.one_of(st.builds(AdditiveUpdate), st.builds(DeltaUpdate, key_norm=st.sampled_from(["l2", "sum"])))
NORMALIZERS = st.one_of(
    st.builds(SumNormalizer),
    st.builds(NoNormalizer),
    st.builds(GroupNormalizer),
    st.builds(RmsNormalizer, output_gate=st.booleans()),
)
COMBINES = st.one_of(
    st.builds(SharedDenominator, learned_sink=st.booleans()),
    st.builds(AbsoluteScale),
    st.builds(Mix),
    st.builds(Add),
)
SHAPES = st.builds(
    lambda heads, head_dim: LayerShape(*heads, head_dim, hidden_size=5, max_positions=256),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from([2, 4, 6]),
)


@st.composite
def configs(draw: st.DrawFn) -> MixerConfig:
    """Any combination that is not refused."""
    named = {"span": SPANS, "feature_map": MAPS, "decay": DECAYS, "update": UPDATES, "normalizer": NORMALIZERS}
    named |= {"combine": COMBINES, "scale": st.sampled_from(["none", "head_dim", "regla"])}
    chosen = {name: draw(strategy) for name, strategy in named.items()}
    # Half of all combinations are refused: change one part after the other until one is not.
    for name in ("normalizer", "combine", "update", "decay", "span", "feature_map"):
        try:
            return MixerConfig(**chosen)
        except ValidationError:
            chosen[name] = draw(
                {
                    "normalizer": st.sampled_from([GroupNormalizer(), NoNormalizer()]),
                    "combine": st.just(Add()),
                    "update": st.just(DeltaUpdate(key_norm="l2")),
                    "decay": st.none(),
                }.get(name, st.just(chosen[name]))
            )
    return MixerConfig(**chosen)


CACHES = st.sampled_from(
    [EvictionCache(size=size, recall_size=first) for size, first in ((1, 0), (2, 0), (2, 1), (5, 0), (5, 2))]
)
BESIDE_A_CACHE = st.builds(
    TerracedSpan, window_size=st.sampled_from([1, 2, 5]), blocks=st.integers(1, 2), sinks=st.sampled_from([0, 0, 1, 3])
)


@st.composite
def beside_a_cache(draw: st.DrawFn) -> MixerConfig:
    """A linear part of any kind that is not refused, beside a window and a KV cache with eviction."""
    config = draw(st.one_of(configs(), sums_of_exponentials()))
    if not config.feature_map.of_one_key:
        config = draw(sums_of_exponentials())
    if getattr(config.feature_map, "per", None) == "model":
        config = replace_part(config, per="kv_head")
    fields = {name: getattr(config, name) for name in MixerConfig.model_fields}
    fields["decay"] = draw(st.sampled_from([None, config.decay]))
    return MixerConfig(**fields | {"span": draw(BESIDE_A_CACHE), "cache": draw(CACHES)})


@st.composite
def sums_of_exponentials(draw: st.DrawFn) -> MixerConfig:
    """Exponential features whose weights are divided by their sum, in any combination that is not refused."""
    span = draw(SPANS)
    windowless = st.sampled_from([SharedDenominator(), SharedDenominator(learned_sink=True), Add()])
    combine = draw(windowless if isinstance(span, NoSpan) else COMBINES)
    decay = draw(DECAYS.filter(lambda decay: decay is None or not decay.values))
    scale = draw(st.sampled_from(["none", "head_dim", "regla"]))
    return MixerConfig(span=span, feature_map=draw(EXPONENTIAL_MAPS), decay=decay, scale=scale, combine=combine)


@dataclass(frozen=True)
class Drawn:
    """A mixer with random float64 parameters, inputs, and which slots hold which document."""

    mixer: LinearMixer | HeadwiseMixer
    inputs: AttnInputs
    documents: Documents

    def __repr__(self) -> str:
        return f"Drawn({self.mixer.config!r}, {self.mixer.shape}, documents={self.documents})"

    @property
    def length(self) -> int:
        return self.inputs.q.shape[2]

    @property
    def layout(self) -> SequenceLayout:
        return own_layout(self.documents, 0, self.length)

    def part(self, start: int, stop: int) -> AttnInputs:
        """The inputs of some slots."""
        return self.inputs.tokens(start, stop)

    def tensors(self) -> dict[str, Tensor]:
        """Every input that is differentiable, by name."""
        x = self.inputs
        assert x.hidden is not None and x.unrotated is not None
        return {"q": x.q, "k": x.k, "v": x.v, "hidden": x.hidden, "q0": x.unrotated[0], "k0": x.unrotated[1]}

    def to(self, dtype: torch.dtype) -> Drawn:
        """This case with its numbers rounded to `dtype`."""
        tensors = {name: x.to(dtype) for name, x in self.tensors().items()}
        assert self.inputs.rope is not None
        cos, sin = (x.to(dtype) for x in self.inputs.rope)
        state = {name: x.to(dtype) for name, x in self.mixer.state_dict().items()}
        mixer = LinearMixer(self.mixer.config, self.mixer.shape).to(dtype)
        mixer.load_state_dict(state)
        return Drawn(mixer.requires_grad_(False), with_tensors(self.inputs, tensors, (cos, sin)), self.documents)


def with_tensors(inputs: AttnInputs, named: dict[str, Tensor], rope: tuple[Tensor, Tensor] | None = None) -> AttnInputs:
    """`inputs` with the tensors of `Drawn.tensors` exchanged."""
    unrotated = (named["q0"], named["k0"])
    rope = inputs.rope if rope is None else rope
    rest = {name: named[name] for name in ("q", "k", "v", "hidden")}
    return replace(inputs, **rest, unrotated=unrotated, rope=rope)


def make_drawn(
    config: MixerConfig | HeadwiseConfig,
    shape: LayerShape,
    documents: Documents,
    length: int,
    seed: int,
    size: float = 1.0,
) -> Drawn:
    """Parameters and inputs for `config`; gates range from hardly forgetting to forgetting at once.

    `size`: standard deviation of queries' and keys' coordinates. In trained models it is often large, so that a query's
    exponential features differ by factors of e^20 and more, and so do keys'.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    mixer = (LinearMixer if isinstance(config, MixerConfig) else HeadwiseMixer)(config, shape).double()
    for name, x in mixer.named_parameters():
        # Gates' pre-activations from about -20 to 20 at some steps; biases stay as the config says.
        x.data.copy_(normal(*x.shape) * (2.0 if "gate." in name else 0.7) if x.ndim > 1 else x.data)
        if name.endswith(("combine.window_factor", "combine.window_weight", "combine.offset", "combine.sink_logit")):
            x.data.copy_(normal(*x.shape))
        if name.endswith("normalizer.weight"):
            x.data.copy_(normal(*x.shape))
    for name, x in mixer.named_buffers():
        x.copy_(normal(*x.shape) * (0.05 if name.endswith("recency") else 1))
    rows, groups, dim = len(documents), shape.num_kv_heads, shape.head_dim
    position = torch.zeros(rows, length, dtype=torch.int64)
    for b, row in enumerate(documents):
        for slots in row:
            position[b, slots] = torch.arange(len(slots))
    angle = position[..., None] * 0.3 ** torch.arange(1, dim // 2 + 1)
    angle = torch.cat([angle, angle], dim=-1).double()
    rope = angle.cos(), angle.sin()
    q, k = size * normal(rows, shape.num_heads, length, dim), size * normal(rows, groups, length, dim)
    burst = torch.where(torch.rand(rows, length, 1, generator=generator, dtype=torch.float64) < 0.2, 5.0, 0.5)
    inputs = AttnInputs(
        q=apply_rope(q, rope),
        k=apply_rope(k, rope),
        v=normal(rows, groups, length, dim),
        scaling=0.7,
        softcap=2.0 if seed % 3 == 0 else None,
        hidden=normal(rows, length, shape.hidden_size) * burst,
        unrotated=(q, k),
        rope=rope,
    )
    return Drawn(mixer.requires_grad_(False), inputs, documents)


@dataclass(frozen=True)
class Draw:
    """What hypothesis chooses; the mixer itself is made in the test."""

    config: MixerConfig
    shape: LayerShape
    styles: list[str]
    length: int
    seed: int
    size: float = 1.0

    def well_conditioned(self) -> Draw:
        """This draw without norms that blow up what is nearly zero, and its rounding in single precision with it."""
        if self.size > 1:
            return replace(self, size=1.0).well_conditioned()
        if not isinstance(self.config.normalizer, GroupNormalizer | RmsNormalizer):
            return self
        normalizer = self.config.normalizer.model_copy(update={"eps": 0.1})
        return replace(self, config=self.config.model_copy(update={"normalizer": normalizer}))

    def cuts(self) -> list[int]:
        """Where to cut the slots into at most nine pieces."""
        rng = random.Random(self.seed)
        return sorted(rng.sample(range(1, self.length), rng.randint(0, min(8, self.length - 1))))

    def make(self) -> Drawn:
        config = self.config
        if config.feature_map is not None and getattr(config.feature_map, "per", None) == "model":
            # One projection over all heads can be shared only where there are as many KV heads as query heads.
            tied = config.feature_map.tied and self.shape.num_heads == self.shape.num_kv_heads
            config = replace_part(config, tied=tied)
        rng = random.Random(self.seed)
        documents = [documents_of(style, self.length, rng) for style in self.styles]
        return make_drawn(config, self.shape, documents, self.length, self.seed, self.size)


def draws(max_length: int, config: st.SearchStrategy[MixerConfig] | None = None) -> st.SearchStrategy[Draw]:
    """Any mixer, or any that `config` draws, with rows of documents and padding of any kind."""
    styles = st.lists(st.sampled_from(STYLES), min_size=1, max_size=2)
    size = st.sampled_from([1.0, 6.0])
    numbers = st.integers(1, max_length), st.integers(0, 2**20)
    return st.builds(Draw, configs() if config is None else config, SHAPES, styles, *numbers, size)


def replace_part(config: MixerConfig, **changes: object) -> MixerConfig:
    """`config` with fields of its feature map changed."""
    assert config.feature_map is not None
    return config.model_copy(update={"feature_map": config.feature_map.model_copy(update=changes)})


def pieces(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """[(start, stop), ...] between the cuts."""
    return list(itertools.pairwise([0, *sorted(cuts), length]))
