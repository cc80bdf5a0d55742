"""The property test over the product of all parts: one function, whichever way it is evaluated.

The oracles (loops transcribed from the papers) = the definition (quadratic) = the chunked form = calls that carry a
state, down to one token at a time; on outputs, final states, and the gradients of every input and parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from linearize.configs.feature_maps import Elu1Map, ExpMap, HedgehogMap, LolcatMap, PerformerMap, ReglaMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import (
    AbsoluteScale,
    Add,
    DeltaUpdate,
    FeatureDecay,
    FixedDecay,
    OuterDecay,
    RefinedDecay,
    RmsNormalizer,
    ScalarDecay,
)
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.evaluation.speed import peak_bytes
from linearize.mixers import linear
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from tests.mixers.forms import (
    FP32,
    FP64,
    assert_near,
    check_bidirectional,
    check_calls,
    check_chunked,
    check_draws,
    check_meta,
    check_oracle,
    check_segments,
    check_short_prompts,
    in_calls,
    outputs_and_gradients,
    small_chunks,
)
from tests.mixers.space import Draw, Drawn, beside_a_cache, draws, make_drawn, sums_of_exponentials


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small_chunks(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_sums(draw: Draw) -> None:
    case = draw.make()
    check_oracle(case)
    check_bidirectional(case)
    check_chunked(case)
    check_calls(case, draw.cuts())


def check_cached(draw: Draw) -> None:
    case = draw.make()
    check_oracle(case)
    check_chunked(case)
    check_calls(case, draw.cuts())


Check = Callable[[Draw], None]
CHECKS: dict[str, tuple[Check, tuple[int, int], tuple[int, int]]] = {
    # By number and greatest length: draws for every run, and for `make test-slow`.
    "oracle": (lambda draw: check_oracle(draw.make()), (40, 24), (500, 36)),
    "bidirectional": (lambda draw: check_bidirectional(draw.make()), (30, 24), (200, 36)),
    "meta device": (lambda draw: check_meta(draw.make()), (60, 1), (500, 1)),
    "chunked": (lambda draw: check_chunked(draw.make()), (60, 60), (800, 150)),
    "single precision": (
        lambda draw: check_chunked(draw.well_conditioned().make().to(torch.float32), FP32),
        *((30, 60), (300, 150)),
    ),
    "calls": (lambda draw: check_calls(draw.make(), draw.cuts()), (40, 40), (500, 100)),
    "short prompts": (
        lambda draw: check_short_prompts(replace(draw, styles=["full", "full"]).make(), draw.cuts()),
        *((20, 24), (300, 40)),
    ),
    "beside a cache, short prompts": (
        lambda draw: check_short_prompts(replace(draw, styles=["full", "full"]).make(), draw.cuts()),
        *((8, 24), (100, 40)),
    ),
    "token by token": (lambda draw: check_calls(draw.make(), range(1, draw.length)), (15, 20), (200, 40)),
    # Rare among all cases, and without a scale: the least denominator must be none of theirs.
    "sums of exponentials": (check_sums, (30, 24), (300, 36)),
    "beside a cache": (check_cached, (12, 24), (400, 40)),
    "beside a cache, token by token": (
        lambda draw: check_calls(draw.make(), range(1, draw.length)),
        (6, 30),
        (200, 60),
    ),
    "beside a cache, segments": (
        lambda draw: check_segments(replace(draw, styles=["full", "full"]).make()),
        *((6, 60), (100, 100)),
    ),
    "beside a cache, meta device": (lambda draw: check_meta(draw.make()), (8, 1), (100, 1)),
    "segments": (lambda draw: check_segments(replace(draw, styles=["full", "full"]).make()), (30, 60), (100, 100)),
}


DRAWN = {  # by name of a check; any mixer where there is none
    "sums of exponentials": sums_of_exponentials(),
    "beside a cache": beside_a_cache(),
    "beside a cache, token by token": beside_a_cache(),
    "beside a cache, segments": beside_a_cache(),
    "beside a cache, short prompts": beside_a_cache(),
    "beside a cache, meta device": beside_a_cache(),
}


def check_name(name: str, examples: int, max_length: int) -> None:
    check_draws(CHECKS[name][0], draws(max_length, DRAWN.get(name)), examples)


@pytest.mark.parametrize("name", CHECKS)
def test_a_few(name: str) -> None:
    check_name(name, *CHECKS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_many(name: str) -> None:
    check_name(name, *CHECKS[name][2])


ABSOLUTE: list[dict[str, Any]] = [
    {"feature_map": HedgehogMap(activation="exp"), "span": SlidingSpan(window_size=5, sinks=2)},
    {"feature_map": PerformerMap(), "span": TerracedSpan(window_size=4)},
    {"feature_map": ReglaMap(feature_dim=4, per="kv_head"), "decay": FixedDecay(), "scale": "regla"},
    {"feature_map": LolcatMap(rotation="none"), "decay": FeatureDecay(rank=2)},
]


@pytest.mark.parametrize("fields", ABSOLUTE)
@pytest.mark.parametrize("style", ["full", "packed", "padded"])
def test_absolute_scale(fields: dict[str, Any], style: str) -> None:
    """Rare among drawn cases: the map must be one of exponentials."""
    fields = {"span": SlidingSpan(window_size=3), "combine": AbsoluteScale()} | fields
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=4, hidden_size=5, max_positions=256)
    draw = Draw(MixerConfig(**fields), shape, [style, style], 23, seed=7)
    check_oracle(draw.make())
    check_chunked(draw.make())
    check_calls(draw.make(), [1, 2, 9, 10, 11, 20, 21, 22])


# --- long sequences that forget at once -------------------------------------------------------------------------------

LONG = {
    "scalar": {"decay": ScalarDecay(input_scale=False, bias_init=-3.0)},
    "running maximum": {"feature_map": ExpMap(temperature=2.0)},
    "feature": {"decay": FeatureDecay(rank=2, temperature=1.0, bias_init=-3.0)},
    "outer": {"decay": OuterDecay(bias_init=-3.0)},
    "refined": {"decay": RefinedDecay(bias_init=-3.0)},
    "gated delta": {
        "decay": ScalarDecay(input_scale=False, bias_init=-3.0),
        "update": DeltaUpdate(key_norm="l2"),
    },
    "vector-gated delta": {
        "decay": FeatureDecay(rank=2, temperature=1.0, bias_init=-3.0),
        "update": DeltaUpdate(key_norm="l2"),
    },
}


def long_case(name: str, span: NoSpan | SlidingSpan) -> Drawn:
    fields = {"feature_map": Elu1Map(), "normalizer": RmsNormalizer(), "combine": Add()} | LONG[name]
    shape = LayerShape(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=5, max_positions=4096)
    return make_drawn(MixerConfig(span=span, **fields), shape, [[list(range(4096))]], 4096, seed=5)


def least_log_decay(case: Drawn) -> float:
    tokens = case.mixer.tokens(case.inputs, case.layout, case.layout, None)[0]
    return min(float(tokens[key].min()) for key in ("log_decay_k", "log_decay_v") if key in tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("span", [NoSpan(), SlidingSpan(window_size=40)], ids=["none", "sliding"])
def test_4096_tokens(name: str, span: NoSpan | SlidingSpan) -> None:
    """Some steps forget by e^-20 and more. The definition is quadratic, and one token at a time takes 4096 calls."""
    case = long_case(name, span)
    assert least_log_decay(case) < -20 or name == "running maximum"
    found, gradients = outputs_and_gradients(case, "chunked")
    expected, expected_gradients = outputs_and_gradients(case, "reference")
    assert_near(found, expected, FP64, "output")
    for key, gradient in expected_gradients.items():
        assert_near(gradients[key], gradient, FP64, f"gradient of {key}")
    assert_near(in_calls(case, range(1, case.length))[0], expected, FP64, "output token by token")
    single = case.to(torch.float32)
    found = outputs_and_gradients(single, "chunked")[0]
    assert_near(found, outputs_and_gradients(single, "reference")[0], FP32, "output in single precision")


def test_memory_without_gradients_does_not_grow_with_the_length() -> None:
    """Beyond the output, that is: segments are worked on one after the other."""
    shape = LayerShape(num_heads=2, num_kv_heads=1, head_dim=16, hidden_size=8, max_positions=8192)
    mixer, beyond = LinearMixer(MixerConfig(), shape), []
    for length in (2048, 8192):
        q, k, v = (torch.randn(1, heads, length, 16) for heads in (2, 1, 1))
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setitem(linear.SEGMENT_NUMBERS, "cpu", 2**10)
            peak = peak_bytes(lambda q=q, k=k, v=v: mixer(AttnInputs(q, k, v, 0.25)))
        beyond.append(peak - q.numel() * q.element_size())
    assert 0 < beyond[1] < 1.1 * beyond[0]
