"""The causal mixer against the LoLCATs oracle, against softmax attention, and call by call against one call."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linearize.configs.feature_maps import ExpMap, FeatureMapConfig, HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import SharedDenominator, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, Span, TerracedSpan
from linearize.mixers.inputs import AttnInputs
from tests.mixers.forms import FP64, assert_near, check_calls, check_oracle, check_short_prompts, in_calls
from tests.mixers.space import Drawn, make_drawn
from tests.ops.cases import SIDE_BY_SIDE, documents_of
from tests.oracles.attention import lolcats_layer, window_partial
from tests.oracles.mixer import span_of

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=8, max_positions=64)
SPANS = [
    NoSpan(),
    SlidingSpan(window_size=1),
    SlidingSpan(window_size=7),
    SlidingSpan(window_size=5, sinks=3),
    TerracedSpan(window_size=4, blocks=1),
    TerracedSpan(window_size=4),
    TerracedSpan(window_size=3, blocks=3, sinks=2),
    TerracedSpan(window_size=13, blocks=1, sinks=12),
]
WITH_WINDOW = SPANS[1:]
each_span = pytest.mark.parametrize("span", SPANS, ids=str)


def make_case(
    span: Span, styles: tuple[str, ...], length: int, *, per: str = "query_head", linear: bool = True, seed: int = 1
) -> Drawn:
    """A float64 mixer with random parameters; scores are capped where `seed` is a multiple of 3."""
    parts = {"feature_map": HedgehogMap(feature_dim=4, per=per)} if linear else {"combine": WindowOnly()}
    config = MixerConfig(**{"span": span, "feature_map": None} | parts)
    rng = random.Random(seed)
    return make_drawn(config, SHAPE, [documents_of(style, length, rng) for style in styles], length, seed)


@pytest.mark.parametrize("per", ["query_head", "kv_head"])
@each_span
def test_lolcats_eq_7(span: Span, per: str) -> None:
    case = make_case(span, ("full", "packed", "mixed"), 33, per=per, seed=3)
    mixer, x = case.mixer, case.inputs
    expected = lolcats_layer(
        *(x.q, x.k, x.v, mixer.feature_map.query_weight, mixer.feature_map.key_weight),
        *(mixer.combine.window_factor.sigmoid(), case.documents, span_of(mixer.config)),
        scaling=x.scaling,
        softcap=x.softcap,
    )
    assert_near(mixer(x, case.layout), expected, FP64, "output")


def test_without_a_layout_every_row_is_one_document() -> None:
    case = make_case(SPANS[2], ("full", "full"), 40)
    assert_near(case.mixer(case.inputs), case.mixer(case.inputs, case.layout), FP64, "output")


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("span", WITH_WINDOW, ids=str)
def test_short_prompts(span: Span, linear: bool) -> None:
    """What no key has left the window of yet, to the first that has."""
    check_short_prompts(make_case(span, ("full", "full"), 20, linear=linear), [5])


@pytest.mark.parametrize("span", WITH_WINDOW, ids=str)
def test_window_only_is_softmax_over_the_span(span: Span) -> None:
    case = make_case(span, ("mixed",), 33, linear=False)
    x, spec = case.inputs, span_of(case.mixer.config)
    num, den, _ = window_partial(x.q, x.k, x.v, case.documents, spec, scaling=x.scaling)
    assert_near(case.mixer(x, case.layout), num / den.clamp_min(1e-6)[..., None], FP64, "output")


@pytest.mark.parametrize("span", WITH_WINDOW, ids=str)
def test_a_learned_sink_is_one_more_key_that_every_query_sees(span: Span) -> None:
    """Softmax over the window's scores and the sink's logit, with a value of its own; padding has output 0."""
    config = MixerConfig(span=span, feature_map=None, combine=WindowOnly(learned_sink=True))
    for seed, shift in ((1, 0), (3, 30), (4, -30)):
        documents = [documents_of(style, 33, random.Random(seed)) for style in ("full", "left", "mixed")]
        case = make_drawn(config, SHAPE, documents, 33, seed)
        with torch.no_grad():
            case.mixer.combine.sink_logit.add_(shift)
        x, combine = case.inputs, case.mixer.combine
        expected = torch.zeros_like(x.q)
        for row, of_row in enumerate(documents):
            for slots in of_row:
                for n, slot in enumerate(slots):
                    first = int(span.lo(torch.tensor(n)))
                    seen = [other for m, other in enumerate(slots[: n + 1]) if m >= first or m < span.sinks]
                    for head in range(4):
                        scores = x.k[row, head // 2, seen] @ x.q[row, head, slot] * x.scaling
                        if x.softcap is not None:
                            scores = x.softcap * (scores / x.softcap).tanh()
                        weights = torch.cat([scores, combine.sink_logit[head, None]]).softmax(0)
                        values = torch.cat([x.v[row, head // 2, seen], combine.sink_value[head // 2, None]])
                        expected[row, head, slot] = weights @ values
        assert_near(case.mixer(x, case.layout), expected, FP64, "output")
    for seed in (1, 3):  # without and with a soft cap
        whole = make_drawn(config, SHAPE, [documents_of("full", 42, random.Random(0))] * 2, 42, seed)
        check_calls(whole, range(1, 42))
        check_short_prompts(make_drawn(config, SHAPE, [documents_of("full", 20, random.Random(0))] * 2, 20, seed), [5])


def test_a_learned_sink_has_gradients() -> None:
    config = MixerConfig(span=SlidingSpan(window_size=5), feature_map=None, combine=WindowOnly(learned_sink=True))
    case = make_drawn(config, SHAPE, [documents_of("full", 12, random.Random(0))], 12, 1)
    combine, x = case.mixer.combine, case.inputs

    def output(logit: Tensor, value: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        named = {"combine.sink_logit": logit, "combine.sink_value": value}
        return torch.func.functional_call(case.mixer, named, (replace(x, q=q, k=k, v=v),))

    inputs = (combine.sink_logit, combine.sink_value, x.q, x.k, x.v)
    assert torch.autograd.gradcheck(output, [tensor.detach().requires_grad_() for tensor in inputs])


def with_sink(span: Span, styles: tuple[str, ...], length: int, seed: int, **fields: object) -> Drawn:
    """A linear part, beside a window or alone, and a learned sink."""
    config = {"feature_map": HedgehogMap(feature_dim=4), "combine": SharedDenominator(learned_sink=True)}
    documents = [documents_of(style, length, random.Random(seed)) for style in styles]
    return make_drawn(MixerConfig(span=span, **config | fields), SHAPE, documents, length, seed)


@pytest.mark.parametrize("feature_map", [HedgehogMap(feature_dim=4), ExpMap()], ids=lambda x: x.type)
@each_span
def test_a_learned_sink_beside_a_linear_part(span: Span, feature_map: FeatureMapConfig) -> None:
    """By the oracle, also where the sink is far larger or smaller than all keys; and in calls."""
    for seed, shift in ((1, 0), (3, 30), (4, -30)):
        case = with_sink(span, ("full", "left", "mixed"), 20, seed, feature_map=feature_map)
        with torch.no_grad():
            case.mixer.combine.sink_logit.add_(shift)
        check_oracle(case)
    check_calls(with_sink(span, ("full", "full"), 30, 1, feature_map=feature_map), range(1, 30))
    check_short_prompts(with_sink(span, ("full", "full"), 20, 1, feature_map=feature_map), [5])


@pytest.mark.parametrize("span", SPANS[:1] + SPANS[3:5], ids=str)
def test_a_learned_sink_beside_a_linear_part_has_gradients(span: Span) -> None:
    """Beside padding too, which gives none."""
    case = with_sink(span, ("interior",), 12, 1)
    x, named = case.inputs, dict(case.mixer.named_parameters())
    names = ["combine.sink_logit", "combine.sink_value", *["combine.window_factor"][: span.max_softmax_keys]]

    def output(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(case.mixer, parameters, (replace(x, q=q, k=k, v=v), case.layout))

    for shift in (0, 3):  # neither and each of window and sink is the larger
        logit = named["combine.sink_logit"] + shift
        leaves = [x.q, x.k, x.v, logit, *(named[name] for name in names[1:])]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        assert torch.autograd.gradcheck(output, leaves, fast_mode=True)


def test_a_learned_sink_in_half_precision() -> None:
    for span in (NoSpan(), SlidingSpan(window_size=7)):
        case = with_sink(span, ("full",), 40, 1, state_dtype="bfloat16")
        half = case.to(torch.bfloat16)
        exact = half.to(torch.float64)
        expected = exact.mixer(exact.inputs)
        for y in (half.mixer(half.inputs), in_calls(half, range(1, 40))[0]):
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.double(), expected, rtol=2**-5, atol=2**-6)


def test_kernels_are_not_asked_for_a_learned_sink() -> None:
    for span in (NoSpan(), SlidingSpan(window_size=7)):
        assert with_sink(span, ("full",), 4, 1).mixer.quotient() is None
        assert with_sink(span, ("full",), 4, 1, combine=SharedDenominator()).mixer.quotient() is not None


@pytest.mark.parametrize("length", [1, 65, 130])
def test_a_window_of_the_whole_sequence_is_softmax_attention(length: int) -> None:
    sliding = SlidingSpan(window_size=length)
    for span in sliding, TerracedSpan(window_size=length, blocks=1), TerracedSpan(window_size=length, sinks=3):
        case = make_case(span, ("full", "full"), length)
        x = case.inputs
        expected = torch.nn.functional.scaled_dot_product_attention(
            x.q, x.k, x.v, is_causal=True, scale=x.scaling, enable_gqa=True
        )
        assert_near(case.mixer(x), expected, FP64, "output")
        assert_near(in_calls(case, range(1, length))[0], expected, FP64, "output token by token")


@each_span
def test_any_calls_give_what_one_call_gives(span: Span) -> None:
    """From the first token on, after a prompt, and where rows are of unlike length, padded left, right or inside."""
    for linear in [True, False][: 1 + (span in WITH_WINDOW)]:
        whole = make_case(span, ("full", "full"), 42, linear=linear)
        check_calls(whole, range(1, 42))
        check_calls(whole, range(21, 42))
    for styles in ("left", "interior", "right", "full"), SIDE_BY_SIDE[:3]:
        case = make_case(span, styles, 30)
        joined = make_case(span, ("full",) * len(styles), 42)
        goes_on = [[*row[:-1], [*row[-1], *range(30, 42)]] for row in case.documents]
        check_calls(replace(joined, documents=goes_on), [11, *range(30, 42)])


@each_span
def test_the_state_is_of_constant_size_from_the_start(span: Span) -> None:
    case = make_case(span, ("full", "full"), 40)
    empty = case.mixer.state_like(case.inputs)
    y, first = case.mixer.step(case.part(0, 1), empty)
    assert_near(y, case.mixer(case.inputs)[:, :, :1], FP64, "output")
    for state in first, in_calls(case, [])[1], in_calls(case, [1, 2, 30])[1]:
        assert [(x.shape, x.dtype) for x in state.tensors()] == [(x.shape, x.dtype) for x in empty.tensors()]
        assert state.nbytes == empty.nbytes


@each_span
def test_rows_of_a_state_can_be_chosen_and_repeated(span: Span) -> None:
    """As beam search does: the chosen rows go on as their originals would."""
    state = in_calls(make_case(span, ("full", "right", "left"), 30), [])[1]
    tail = make_case(span, ("full",) * 3, 5, seed=2)
    mixer, x = tail.mixer, tail.inputs
    y = mixer.step(x, state)[0]
    for index, chosen in (
        ([2, 0, 0], state.select(torch.tensor([2, 0, 0]))),
        ([0, 0, 1, 1, 2, 2], state.repeat(2)),
    ):
        rows = AttnInputs(x.q[index], x.k[index], x.v[index], x.scaling)
        assert_near(mixer.step(rows, chosen)[0], y[index], FP64, "output")


def test_half_precision_and_autocast_stay_outside() -> None:
    """Outputs come in the inputs' dtype; sums inside are fp32, whatever the surrounding autocast says."""
    half = make_case(SlidingSpan(window_size=7, sinks=2), ("full",), 80).to(torch.bfloat16)
    exact = half.to(torch.float64)
    expected = exact.mixer(exact.inputs)
    y = half.mixer(half.inputs)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    prompt, state = half.mixer.step(half.part(0, 79), None)
    assert prompt.dtype == torch.bfloat16
    torch.testing.assert_close(prompt.double(), expected[:, :, :79], rtol=2**-8, atol=1e-5)
    step, _ = half.mixer.step(half.part(79, 80), state)
    torch.testing.assert_close(step.double(), expected[:, :, 79:], rtol=2**-8, atol=1e-5)
    single = half.to(torch.float32)
    expected = single.mixer(single.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(single.mixer(single.inputs), expected, rtol=0, atol=0)


@each_span
def test_gradients_reach_every_parameter(span: Span) -> None:
    """Against finite differences, through the whole layer."""
    case = make_case(span, ("interior",), 20)
    weights = {name: x.detach().requires_grad_() for name, x in case.mixer.named_parameters()}

    def layer(*values: Tensor) -> Tensor:
        named = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(case.mixer, named, (case.inputs, case.layout))

    if span == NoSpan():
        del weights["combine.window_factor"]  # without a window there is nothing to weigh
    assert torch.autograd.gradcheck(layer, tuple(weights.values()), fast_mode=True)
