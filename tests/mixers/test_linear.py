"""The causal mixer against the LoLCATs oracle, against softmax attention, and call by call against one call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.mixers import AttnInputs, LinearMixer, MixerState
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.mixers.feature_maps import HedgehogMap
from linearize.mixers.shape import LayerShape
from linearize.ops import Layout, NoSpan, SlidingSpan, TerracedSpan
from tests.ops.cases import SIDE_BY_SIDE, WITH_GAPS, Case, make_case
from tests.oracles.attention import lolcats_layer, window_partial
from tests.oracles.spans import SpanSpec

HEAD_DIM = 6
SPANS = [
    SpanSpec("none"),
    SpanSpec("sliding", 1),
    SpanSpec("sliding", 7),
    SpanSpec("sliding", 5, sinks=3),
    SpanSpec("terraced", 4, 1),
    SpanSpec("terraced", 4, 2),
    SpanSpec("terraced", 3, 3, 2),
    SpanSpec("terraced", 13, 1, 12),
]
each_span = pytest.mark.parametrize("span", SPANS, ids=str)


def make_mixer(span: SpanSpec, case: Case, *, linear: bool = True, per: str = "query_head") -> LinearMixer:
    """A float64 mixer with random parameters."""
    sizes = {"window_size": span.window_size, "sinks": span.sinks}
    config = {
        "none": lambda: NoSpan(),
        "sliding": lambda: SlidingSpan(**sizes),
        "terraced": lambda: TerracedSpan(**sizes, blocks=span.blocks),
    }[span.kind]()
    if linear:
        mixer_config = MixerConfig(span=config, feature_map=HedgehogMap(feature_dim=4, per=per))
    else:
        mixer_config = MixerConfig(span=config, feature_map=None, combine=WindowOnly())
    shape = LayerShape(case.q.shape[1], case.k.shape[1], HEAD_DIM, hidden_size=8, max_positions=64)
    mixer = LinearMixer(mixer_config, shape).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in mixer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixer.requires_grad_(False)


def inputs_of(case: Case, start: int = 0, stop: int | None = None) -> AttnInputs:
    q, k, v = (x[:, :, start:stop] for x in (case.q, case.k, case.v))
    return AttnInputs(q, k, v, case.scaling, case.softcap)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def in_calls(mixer: LinearMixer, case: Case, cuts: Sequence[int]) -> tuple[Tensor, MixerState]:
    """Outputs of `step` over the pieces between the cuts; padding by layout, whole rows without one."""
    state, outputs = None, []
    valid = case.position >= 0
    for start, stop in zip([0, *cuts], [*cuts, case.length], strict=True):
        piece = valid[:, start:stop]
        layout = None if piece.all() else Layout.from_valid(piece)
        y, state = mixer.step(inputs_of(case, start, stop), state, layout)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("per", ["query_head", "kv_head"])
@each_span
def test_lolcats_eq_7(span: SpanSpec, per: str) -> None:
    case = make_case(span, ("full", "packed", "mixed"), 33, heads=(4, 2, 4), seed=3, softcap=2.0)
    mixer = make_mixer(span, case, per=per)
    expected = lolcats_layer(
        case.q,
        case.k,
        case.v,
        mixer.feature_map.query_weight,
        mixer.feature_map.key_weight,
        mixer.combine.window_factor.sigmoid(),
        case.documents,
        span,
        scaling=case.scaling,
        softcap=case.softcap,
    )
    assert_equal(mixer(inputs_of(case), case.layout), expected)


def test_without_a_layout_every_row_is_one_document() -> None:
    case = make_case(SPANS[2], ("full", "full"), 40)
    mixer = make_mixer(SPANS[2], case)
    assert_equal(mixer(inputs_of(case)), mixer(inputs_of(case), case.layout))


def test_window_only_is_softmax_over_the_span() -> None:
    for span in SPANS[2], SPANS[3], SPANS[6]:
        case = make_case(span, ("mixed",), 33, heads=(4, 2, 4), seed=3)
        num, den, _ = window_partial(case.q, case.k, case.v, case.documents, span, scaling=case.scaling)
        y = make_mixer(span, case, linear=False)(inputs_of(case), case.layout)
        assert_equal(y, num / den.clamp_min(1e-6)[..., None])


@pytest.mark.parametrize("length", [1, 65, 130])
def test_a_window_of_the_whole_sequence_is_softmax_attention(length: int) -> None:
    for span in SpanSpec("sliding", length), SpanSpec("terraced", length, 1), SpanSpec("terraced", length, 2, 3):
        case = make_case(span, ("full", "full"), length, heads=(4, 2, 4))
        expected = torch.nn.functional.scaled_dot_product_attention(
            case.q, case.k, case.v, is_causal=True, scale=case.scaling, enable_gqa=True
        )
        mixer = make_mixer(span, case)
        assert_equal(mixer(inputs_of(case)), expected)
        assert_equal(in_calls(mixer, case, range(1, length))[0], expected)


@each_span
def test_token_by_token(span: SpanSpec) -> None:
    """From the first token on, and after a prompt."""
    case = make_case(span, ("full", "full"), 50, heads=(4, 2, 4), seed=1)
    for mixer in [make_mixer(span, case)] + ([make_mixer(span, case, linear=False)] if span.kind != "none" else []):
        expected = mixer(inputs_of(case))
        assert_equal(in_calls(mixer, case, range(1, 50))[0], expected)
        assert_equal(in_calls(mixer, case, range(21, 50))[0], expected)


@each_span
def test_padded_prompts_then_tokens(span: SpanSpec) -> None:
    """Rows of unlike length, padded left, right or inside; then every row goes on token by token."""
    case = make_case(span, ("left", "interior", "right", "full"), 30, seed=4)
    tail = make_case(span, ("full",) * 4, 12, seed=5)
    joined = Case(
        *(torch.cat([getattr(case, x), getattr(tail, x)], 2) for x in ("q", "k", "v", "phi_q", "phi_k")),
        documents=[[[*row[0], *range(30, 42)]] for row in case.documents],
        span=span,
    )
    mixer = make_mixer(span, case)
    y, state = in_calls(mixer, joined, [11, *range(30, 42)])
    assert_equal(y, mixer(inputs_of(joined), joined.layout))
    assert state.seen.tolist() == [len(row[0]) for row in joined.documents]


@settings(max_examples=30, derandomize=True, database=None)
@given(
    span=st.sampled_from(SPANS),
    styles=st.sampled_from([("full", "full"), SIDE_BY_SIDE[:3], ("interior", "left"), WITH_GAPS[:1]]),
    cuts=st.sets(st.integers(1, 69), max_size=12),
    seed=st.integers(0, 1000),
)
def test_any_calls_give_what_one_call_gives(span: SpanSpec, styles: tuple[str, ...], cuts: set[int], seed: int) -> None:
    case = make_case(span, styles, 70, seed=seed)
    mixer = make_mixer(span, case)
    y, state = in_calls(mixer, case, sorted(cuts))
    assert_equal(y, mixer(inputs_of(case), case.layout))
    assert state.seen.tolist() == [len(row[0]) if row else 0 for row in case.documents]


@each_span
def test_the_state_is_of_constant_size_from_the_start(span: SpanSpec) -> None:
    case = make_case(span, ("full", "full"), 40)
    mixer = make_mixer(span, case)
    empty = mixer.state_like(inputs_of(case))
    y, first = mixer.step(inputs_of(case, 0, 1), empty)
    assert_equal(y, mixer(inputs_of(case))[:, :, :1])
    for state in first, in_calls(mixer, case, [])[1], in_calls(mixer, case, [1, 2, 30])[1]:
        assert [x.shape for x in state.tensors()] == [x.shape for x in empty.tensors()]
        assert [x.dtype for x in state.tensors()] == [x.dtype for x in empty.tensors()]
        assert state.nbytes == empty.nbytes


@each_span
def test_rows_of_a_state_can_be_chosen_and_repeated(span: SpanSpec) -> None:
    """As beam search does: the chosen rows go on as their originals would."""
    case = make_case(span, ("full", "right", "left"), 30, seed=2)
    tail = make_case(span, ("full",) * 3, 5, seed=3)
    mixer = make_mixer(span, case)
    state = in_calls(mixer, case, [])[1]
    for index, chosen in (
        ([2, 0, 0], state.select(torch.tensor([2, 0, 0]))),
        ([0, 0, 1, 1, 2, 2], state.repeat(2)),
    ):
        x = inputs_of(tail)
        rows = AttnInputs(x.q[index], x.k[index], x.v[index], x.scaling)
        assert_equal(mixer.step(rows, chosen)[0], mixer.step(x, state)[0][index])


def test_half_precision_and_autocast_stay_outside() -> None:
    """Outputs come in the inputs' dtype; sums inside are fp32, whatever the surrounding autocast says."""
    span = SpanSpec("sliding", 7, sinks=2)
    case = make_case(span, ("full",), 80)
    mixer = make_mixer(span, case).to(torch.bfloat16)
    inputs = inputs_of(case.to(torch.bfloat16))
    exact = mixer.double()(inputs_of(case.to(torch.bfloat16).to(torch.float64)))
    mixer = mixer.to(torch.bfloat16)
    y = mixer(inputs)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    step, _ = mixer.step(inputs_of(case.to(torch.bfloat16), 79, 80), in_calls(mixer, prompt_of(case), [])[1])
    torch.testing.assert_close(step.double(), exact[:, :, 79:], rtol=2**-8, atol=1e-5)
    single = inputs_of(case.to(torch.float32))
    mixer = mixer.float()
    expected = mixer(single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(mixer(single), expected, rtol=0, atol=0)


def prompt_of(case: Case) -> Case:
    """All tokens but the last, in bfloat16."""
    case = case.to(torch.bfloat16)
    names = ("q", "k", "v", "phi_q", "phi_k")
    parts = [getattr(case, name)[:, :, :-1] for name in names]
    return Case(*parts, documents=[[list(range(case.length - 1))]], span=case.span)


@each_span
def test_gradients_reach_every_parameter(span: SpanSpec) -> None:
    """Against finite differences, through the whole layer."""
    case = make_case(span, ("interior",), 20, heads=(2, 1, 2), seed=1)
    mixer = make_mixer(span, case)
    weights = {name: x.detach().requires_grad_() for name, x in mixer.named_parameters()}

    def layer(*values: Tensor) -> Tensor:
        named = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(mixer, named, (inputs_of(case), case.layout))

    if span.kind == "none":
        del weights["combine.window_factor"]  # without a window there is nothing to weigh
    assert torch.autograd.gradcheck(layer, tuple(weights.values()), fast_mode=True)
