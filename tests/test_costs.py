"""What a mixer costs, against sums done by hand and against the mixers themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linearize.costs import mixer_activations, mixer_flops, new_parameters, state_bytes
from linearize.hf.teacher import TeacherShape
from linearize.mixers import AttnInputs, LinearMixer
from linearize.mixers.combine import Add, Mix, WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.mixers.feature_maps import (
    CosformerMap,
    DpfpMap,
    Elu1Map,
    ExpMap,
    HedgehogMap,
    IdentityMap,
    LolcatMap,
    PerformerMap,
    ReglaMap,
    RfaMap,
    T2RMap,
    TaylorMap,
)
from linearize.mixers.gates import FeatureDecay, FixedDecay, OuterDecay, RefinedDecay, ScalarDecay
from linearize.mixers.normalizers import GroupNormalizer, NoNormalizer, RmsNormalizer
from linearize.mixers.update import DeltaUpdate
from linearize.ops import NoSpan, SlidingSpan, TerracedSpan
from tests.shapes import make_shape

# H = 4, G = 2, D = 8, hidden size 32; and without RoPE, and without GQA.
SMALL = make_shape("llama", 2, 4, 2, 8, 32, 80, 101, 64, False)
SMALL_GPT2 = make_shape("gpt2", 2, 4, 4, 8, 32, 128, 101, 64, True)
SLIDING, SINKS = SlidingSpan(window_size=5), SlidingSpan(window_size=5, sinks=3)
TERRACED = TerracedSpan(window_size=5, blocks=3, sinks=2)
SIX = HedgehogMap(feature_dim=6)
GROUP, RMS, ADD = GroupNormalizer(), RmsNormalizer(), Add()
PLAIN = dict(normalizer=NoNormalizer(), combine=Mix())
MIXERS = {
    "sliding": MixerConfig(span=SLIDING, feature_map=SIX),
    "per KV head, sinks": MixerConfig(span=SINKS, feature_map=HedgehogMap(feature_dim=6, per="kv_head")),
    "terraced": MixerConfig(span=TERRACED, feature_map=SIX),
    "no window": MixerConfig(span=NoSpan(), feature_map=SIX),
    "window only": MixerConfig(span=SLIDING, feature_map=None, combine=WindowOnly()),
    "window only, sinks": MixerConfig(span=SINKS, feature_map=None, combine=WindowOnly()),
    # Exponentials carry their running maximum: a step and an offset per slot, and the last one.
    "maximum": MixerConfig(span=SLIDING, feature_map=ReglaMap(feature_dim=6, per="kv_head")),
    "maximum, mix": MixerConfig(span=TERRACED, feature_map=LolcatMap(tied=True), combine=Mix()),
    "maximum, fixed decay": MixerConfig(span=SINKS, feature_map=ExpMap(), decay=FixedDecay(), combine=ADD),
    "maximum, feature gate": MixerConfig(
        span=SLIDING, feature_map=PerformerMap(feature_dim=6), decay=FeatureDecay(rank=3)
    ),
    "maximum, refined gate of values": MixerConfig(
        span=SLIDING, feature_map=ReglaMap(feature_dim=6), decay=RefinedDecay(), scale="regla", **PLAIN
    ),
    # Maps that see unrotated keys, and features that are rotated themselves.
    "unrotated": MixerConfig(span=SINKS, feature_map=CosformerMap()),
    "rotated after": MixerConfig(
        span=SLIDING,
        feature_map=T2RMap(rotation="after", per="model"),
        decay=FixedDecay(schedule="retnet"),
        normalizer=GROUP,
        combine=Mix(),
    ),
    "rotated after, tied": MixerConfig(
        feature_map=T2RMap(rotation="after", per="kv_head", tied=True, bias=False),
        span=TERRACED,
        normalizer=RMS,
        combine=ADD,
    ),
    "maximum, rotated after": MixerConfig(span=SLIDING, feature_map=ExpMap(rotation="after"), **PLAIN),
    # Gates and the delta rule.
    "input scale": MixerConfig(span=SLIDING, feature_map=RfaMap(), decay=ScalarDecay(), combine=ADD),
    "input scale, mix": MixerConfig(
        span=SINKS,
        feature_map=TaylorMap(),
        decay=ScalarDecay(),
        combine=Mix(),
    ),
    "outer gate": MixerConfig(span=SINKS, feature_map=Elu1Map(), decay=OuterDecay(), **PLAIN),
    "refined gate of features": MixerConfig(span=TERRACED, feature_map=Elu1Map(), decay=RefinedDecay(axis="feature")),
    "delta": MixerConfig(span=SLIDING, feature_map=DpfpMap(nu=2), update=DeltaUpdate(key_norm="sum"), **PLAIN),
    "delta of exponentials": MixerConfig(
        span=TERRACED,
        feature_map=HedgehogMap(feature_dim=6, activation="exp", bias=True),
        update=DeltaUpdate(),
        normalizer=GROUP,
        combine=ADD,
    ),
    "gated delta, output gate": MixerConfig(
        span=SINKS,
        feature_map=IdentityMap(rotation="none"),
        decay=FeatureDecay(rank=3),
        update=DeltaUpdate(),
        scale="head_dim",
        normalizer=RmsNormalizer(output_gate=True),
        combine=ADD,
    ),
    "pure delta": MixerConfig(
        span=NoSpan(),
        feature_map=IdentityMap(),
        decay=ScalarDecay(input_scale=False),
        update=DeltaUpdate(),
        normalizer=RMS,
        combine=ADD,
    ),
}
# A slot has 2 x 2 x 8 numbers in bf16, 16 more with unrotated keys, and 2 x 8 with cosines
# and sines. S and z have F x 9 numbers per head of the state.
BY_HAND = {
    "sliding": (4 * 24 + 4 * 24 + 4, 4 * (4 * 54) + 2 * (5 * 32)),
    "per KV head, sinks": (4 * 24 + 2 * 24 + 4, 4 * (2 * 54) + 2 * (8 * 32)),
    "terraced": (4 * 24 + 4 * 24 + 4, 4 * (2 * 4 * 54) + 2 * (17 * 32)),
    "no window": (4 * 24 + 4 * 24 + 4, 4 * (4 * 54)),
    "window only": (0, 2 * (5 * 32)),
    "window only, sinks": (0, 2 * (8 * 32)),
    "maximum": (4 * 48 + 2 * 48 + 4, 4 * (2 * 54 + 2) + 5 * (2 * 32 + 4 * (2 + 2))),
    "maximum, mix": (4 * 64 + 4, 4 * (2 * 4 * 72 + 4) + 17 * (2 * 32 + 4 * (4 + 4))),
    # One state per query head, though keys have one map per KV head.
    "maximum, fixed decay": (0, 4 * (4 * 72 + 2) + 8 * (2 * 32 + 4 * (4 + 2))),
    # Performer's maximum is fp64.
    "maximum, feature gate": (
        3 * 32 + 2 * 6 * 4 + 4,
        4 * (2 * 54) + 8 * 2 + 5 * (2 * 32 + 4 * (2 * 6) + 8 * 2),
    ),
    "maximum, refined gate of values": (
        2 * 4 * 48 + 2 * 4 * 8 * 33 + 4,
        4 * (4 * 54 + 4) + 5 * (2 * 32 + 4 * (4 + 4 * 8 + 4)),
    ),
    "unrotated": (4, 4 * (2 * 16 * 9) + 8 * (2 * 48)),
    "rotated after": (32 * 33 + 16 * 17 + 4, 4 * (4 * 72) + 5 * (2 * 64 + 4 * 4)),
    "rotated after, tied": (2 * 64 + 32, 4 * (2 * 2 * 72) + 17 * (2 * 64)),
    "maximum, rotated after": (4, 4 * (2 * 72 + 2) + 5 * (2 * 64 + 4 * (2 + 2))),
    "input scale": (2 + 2 * 33, 4 * (2 * 16 * 9) + 5 * (2 * 32 + 4 * (2 + 2))),
    "input scale, mix": (2 * 33 + 4, 4 * (2 * 45 * 9) + 8 * (2 * 32 + 4 * (2 + 2))),
    "outer gate": (2 * 16 * 33 + 4, 4 * (2 * 72) + 8 * (2 * 32 + 4 * (2 * 8 + 2 * 8))),
    "refined gate of features": (2 * 2 * 8 * 33 + 4, 4 * (2 * 2 * 72) + 17 * (2 * 32 + 4 * 2 * 8)),
    "delta": (2 * 32 + 4, 4 * (2 * 32 * 9) + 5 * (2 * 32 + 4 * 2)),
    "delta of exponentials": (2 * 4 * 27 + 4 * 32, 4 * (2 * 4 * 54) + 17 * (2 * 32 + 4 * 4)),
    "gated delta, output gate": (
        3 * 32 + 2 * 8 * 4 + 2 * 32 + 32 * 33,
        4 * (2 * 72) + 8 * (2 * 48 + 4 * (2 * 8 + 2)),
    ),
    "pure delta": (2 * 33 + 2 * 32 + 32, 4 * (2 * 72)),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_by_hand(name: str) -> None:
    parameters, state = BY_HAND[name]
    assert new_parameters(MIXERS[name], SMALL) == parameters
    assert state_bytes(MIXERS[name], SMALL, kv_bytes_per_element=2, layer=0) == state


def test_without_rope_there_is_nothing_unrotated_to_keep() -> None:
    for rotation in ("before", "after", "none"):
        mixer = MixerConfig(span=SINKS, feature_map=Elu1Map(rotation=rotation), **PLAIN)
        # 8 slots of 2 x 4 x 8 numbers; S and z of 4 heads.
        assert state_bytes(mixer, SMALL_GPT2, kv_bytes_per_element=2, layer=0) == 2 * 8 * 64 + 4 * (4 * 72)


def inputs_of(teacher: TeacherShape, length: int) -> AttnInputs:
    """All that a layer can hand its mixer, in bf16."""

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(1, *sizes, dtype=torch.bfloat16)

    q, kv = (zeros(heads, length, 8) for heads in (teacher.num_heads, teacher.num_kv_heads))
    rope = dict(unrotated=(q, kv), rope=(zeros(length, 8), zeros(length, 8))) if teacher.rotary_dims[0] else {}
    return AttnInputs(q, kv, kv, scaling=1.0, hidden=zeros(length, 32), **rope)


@pytest.mark.parametrize("teacher", [SMALL, SMALL_GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_itself(name: str, teacher: TeacherShape) -> None:
    mixer = LinearMixer(MIXERS[name], teacher.layer)
    assert new_parameters(MIXERS[name], teacher) == sum(parameter.numel() for parameter in mixer.parameters())
    expected = state_bytes(MIXERS[name], teacher, kv_bytes_per_element=2, layer=0)
    empty = mixer.state_like(inputs_of(teacher, 1))
    assert empty.nbytes - empty.seen.nbytes == expected
    _, state = mixer.step(inputs_of(teacher, 40), None)
    assert state.nbytes - state.seen.nbytes == expected, "as much as at the start"


# Window of 5: 4 x 32 x 5 = 640. H F D = 4 x 8 x F, twice: read S, and for 4 heads also fold it; half of it for G = 2.
FLOPS_BY_HAND = {
    "sliding": 640 + 2 * (2 * 4 * 24 + 4) + 2 * (4 + 4) * 6 * 8,
    "window only": 640,
    # A tied projection is used twice, by queries and by keys.
    "maximum, mix": 4 * 32 * 17 + 2 * (2 * 4 * 64 + 4) + 2 * (4 + 4) * 8 * 8,
    "maximum, feature gate": 640 + 2 * (4 + 2) * 6 * 8 + 2 * (3 * 32 + 2 * 6 * 4 + 4) + 2 * (4 + 2) * 6 * 8,
    "rotated after": 640 + 2 * (32 * 32 + 16 * 16) + 2 * 4 + 2 * (4 + 4) * 8 * 8,
    "rotated after, tied": 4 * 32 * 17 + 2 * (4 + 2) * 64 + 2 * 32 + 2 * (4 + 2) * 8 * 8,
    "input scale": 640 + 2 * (4 + 2) * 8 * 8 + 2 * 2 * 33 + 2 * (4 + 2) * 16 * 8,
    # The delta rule reads S twice.
    "delta": 640 + 2 * (2 * 32 + 4) + 2 * (4 + 2 + 2) * 32 * 8,
    "pure delta": 2 * (2 * 33 + 2 * 32 + 32) + 2 * (4 + 2 + 2) * 8 * 8,
}


@pytest.mark.parametrize("name", FLOPS_BY_HAND)
def test_mixer_flops_by_hand(name: str) -> None:
    assert mixer_flops(MIXERS[name], SMALL, sequence_length=64) == FLOPS_BY_HAND[name]


def test_a_kernel_in_closed_form_keeps_inputs_and_not_features() -> None:
    """Taylor's 45 features of 8 inputs; not where a gate or a scale changes features, or a mixer is not causal."""
    mixer = MixerConfig(span=NoSpan(), feature_map=TaylorMap(), combine=ADD)
    as_wide_as_inputs = mixer_activations(mixer.model_copy(update={"feature_map": Elu1Map()}), SMALL)
    all_features = as_wide_as_inputs + 4 * (4 + 2) * (45 - 8)
    assert mixer_activations(mixer, SMALL) == as_wide_as_inputs
    assert mixer_activations(mixer.model_copy(update={"scale": "head_dim"}), SMALL) == all_features
    assert mixer_activations(mixer, replace(SMALL, bidirectional=True)) == all_features
