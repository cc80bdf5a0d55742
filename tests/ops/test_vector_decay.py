"""Decays that differ between features or values, against a recurrence over tokens and against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linearize.evaluation.speed import peak_bytes
from linearize.ops import chunk_recurrence, reference, vector_decay
from linearize.ops.decay_products import decay_factor
from linearize.ops.layout import Layout
from linearize.ops.linear_state import LinearState
from linearize.ops.span import NoSpan, SlidingSpan, Span, TerracedSpan
from tests.ops.cases import HEADS, SIDE_BY_SIDE, SINK_SPANS, SPANS, WITH_GAPS, Case, make_case
from tests.ops.parity import FP64, assert_near, carried_state, part_of
from tests.ops.recurrence import assert_all_near, gently, recurrence, with_gradients
from tests.oracles.spans import SpanSpec
from tests.probes import LargestTensor, flops

RULES = ("features", "values", "gates")
# Every third span always, the others among the slow tests.
EACH_SPAN = [
    pytest.param(span, id=str(span), marks=pytest.mark.slow if index % 3 else ())
    for index, span in enumerate(SPANS + SINK_SPANS)
]
FP32 = 1e-4
LEAVES = ("phi_q", "phi_k", "v", "log_decay_k", "log_decay_v")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of a few heads at a time, so that short sequences cross block boundaries too."""
    monkeypatch.setattr(chunk_recurrence, "BLOCK_SCORES", {"cpu": 3 * 64**2})
    monkeypatch.setattr(chunk_recurrence, "MIN_CHUNKS_PER_BLOCK", 1)


def linear_part(ops, case: Case, layout: Layout, state: LinearState | None = None) -> tuple[Tensor, Tensor]:
    """num and den of the module `ops`."""
    options = {"span": case.package_span, "layout": layout, "state": state}
    partial = ops.linear_scan(case.phi_q, case.phi_k, case.v, **case.decays, **options)
    return partial.num, partial.den


def check(case: Case, tolerance: float, layout: Layout | None = None, state: LinearState | None = None) -> None:
    """Outputs and all gradients are those of the definition."""
    layout = case.layout if layout is None else layout
    found, expected = (
        with_gradients(lambda case, state, ops=ops: linear_part(ops, case, layout, state), case, LEAVES, state)
        for ops in (vector_decay, reference)
    )
    assert_all_near(found, expected, tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("span", EACH_SPAN)
def test_token_by_token(span: SpanSpec, rule: str, small_blocks: None) -> None:
    case = make_case(span, ("full", "packed", "mixed"), 75, heads=(2, 1, 1), seed=4, rule=rule)
    for one in (case, gently(case)):
        expected = recurrence(one)
        num, den = linear_part(vector_decay, one, one.layout)
        assert_near(num, expected.num, FP64, "num")
        assert_near(den, expected.den, FP64, "den")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("span", EACH_SPAN)
def test_outputs_and_gradients(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for i, length in enumerate((1, 63, 130, 150)):
        styles = (SIDE_BY_SIDE, WITH_GAPS)[i % 2]
        case = make_case(span, styles, length, heads=HEADS[i], seed=length, rule=rule)
        check(gently(case), FP64)
    check(case, FP64)
    check(case.to(torch.float32), FP32)
    check(gently(case).to(torch.float32), FP32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("span", SPANS[::3] + SINK_SPANS[::3], ids=str)
def test_blocks_of_several_chunks_and_heads(span: SpanSpec, rule: str) -> None:
    case = make_case(span, ("packed", "mixed"), 200, heads=(2, 1, 1), seed=6, rule=rule)
    check(gently(case), FP64)
    full = make_case(span, ("full", "full"), 150, heads=(2, 1, 2), seed=7, rule=rule)
    check(full.to(torch.float32), FP32, layout=Layout.full(150))


@pytest.mark.parametrize("span", [SpanSpec("sliding", 150, sinks=1), SpanSpec("terraced", 70, 3)], ids=str)
def test_windows_of_several_chunks(span: SpanSpec) -> None:
    case = gently(make_case(span, ("packed", "full"), 330, heads=(1, 1, 1), seed=3, rule="gates"))
    check(case, FP64)
    check(case.to(torch.float32), FP32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("span", EACH_SPAN)
def test_with_context_and_a_carried_state(span: SpanSpec, rule: str) -> None:
    for start in (3, 60):
        case = make_case(span, ("packed", "interior"), 111, heads=(2, 1, 2), seed=start, rule=rule)
        part, layout = part_of(gently(case), start, case.length)
        check(part, FP64, layout=layout, state=carried_state(part))


def test_one_decay_for_all_rows() -> None:
    """Fixed decays have a batch axis of 1, and their gradient is the sum over rows."""
    case = make_case(SpanSpec("sliding", 7), ("full", "full"), 90, rule="features")
    assert case.log_decay_k is not None
    check(replace(gently(case), log_decay_k=case.log_decay_k[:1] / 100), FP64)
    check(replace(case, log_decay_k=case.log_decay_k[:1]), FP64, layout=Layout.full(90))


def test_a_decay_of_the_head_beside_one_of_the_values() -> None:
    case = make_case(SpanSpec("terraced", 16, 2), ("packed", "mixed"), 150, rule="gates")
    assert case.log_decay_k is not None
    case = replace(case, log_decay_k=case.log_decay_k[..., :1])
    check(case, FP64)
    check(gently(case), FP64)


def test_what_lies_in_padding_does_not_matter() -> None:
    for span in (SpanSpec("none"), SpanSpec("sliding", 7, sinks=2), SpanSpec("terraced", 7, 2)):
        case = make_case(span, ("mixed", "left", "interior"), 90, rule="gates")
        grown = linear_part(vector_decay, case.grown(1e6), case.layout)
        for found, expected in zip(grown, linear_part(vector_decay, case, case.layout), strict=True):
            assert_near(found, expected, FP64, "with other padding")


# --- long sequences ---------------------------------------------------------------------------------------------------


def long_case(span: SpanSpec, log_decay: Callable[[Tensor], Tensor], length: int = 4096) -> Case:
    """One row; both axes decay, each by `log_decay` of uniform random numbers."""
    case = make_case(span, ("full",), length, heads=(2, 1, 1), seed=8, rule="gates")
    generator = torch.Generator().manual_seed(9)
    decays = {
        f"log_decay_{axis}": log_decay(torch.rand(1, 1, length, width, generator=generator, dtype=torch.float64))
        for axis, width in (("k", 4), ("v", 6))
    }
    return replace(case, **decays)


DECAYS = {
    "mixed": lambda x: torch.where(x < 0.9, 0, torch.where(x < 0.95, -x / 100, -20 * x)),
    "slow": lambda x: -1e-5 * x[:, :, :1].expand_as(x),  # a rounding of each step's factor would add up
    "fast": lambda x: torch.full_like(x, -20),
    "moderate": lambda x: -3 * x,
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("span", [SpanSpec("none"), SpanSpec("sliding", 70, 2), SpanSpec("terraced", 64, 2)], ids=str)
def test_4096_steps_in_float32(span: SpanSpec, decay: str) -> None:
    case = long_case(span, DECAYS[decay]).to(torch.float32)
    expected = recurrence(case)
    found = with_gradients(lambda case, state: linear_part(vector_decay, case, case.layout), case, LEAVES, None)
    assert_near(found["output 0"], expected.num.float(), 2e-5, "num")
    assert_near(found["output 1"], expected.den.float(), 2e-5, "den")
    assert all(x.isfinite().all() for x in found.values())


def test_a_key_that_decays_at_once_is_read_by_its_own_query_only() -> None:
    case = long_case(SpanSpec("none"), DECAYS["fast"])
    num, _ = linear_part(vector_decay, case, case.layout)
    own = (case.phi_q * case.phi_k).sum(-1, keepdim=True) * case.v
    assert_near(num, own, 1e-6, "num")


def test_factors_are_neither_denormal_nor_make_denormal_products() -> None:
    for dtype in (torch.float32, torch.float64):
        factor = decay_factor(torch.linspace(-1000, 0, 4001, dtype=dtype))
        assert ((factor == 0) | (factor.square() >= torch.finfo(dtype).tiny)).all()
        assert factor[-1] == 1
        assert (factor[1:] >= factor[:-1]).all()


def attention(span: Span, length: int, *, backward: bool) -> Callable[[], None]:
    """A call with decays on both axes at a length; H = 2, G = 1, D = F = 16, two documents."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, log_k, log_v = (torch.rand(1, heads, length, 16, generator=generator) for heads in (2, 2, 1, 2, 2))
    leaves = [x.requires_grad_(backward) for x in (q, k, v, -log_k, -log_v)]
    position = torch.arange(length)[None] % (length // 2 + 5)

    def call() -> None:
        options = {"span": span, "layout": Layout.from_positions(position)}
        q, k, v, log_k, log_v = leaves
        partial = vector_decay.linear_scan(q, k, v, log_decay_k=log_k, log_decay_v=log_v, **options)
        if backward:
            (partial.num.sum() + partial.den.sum()).backward()

    return call


each_span = pytest.mark.parametrize("span", [NoSpan(), SlidingSpan(sinks=4), TerracedSpan()], ids=str)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@each_span
def test_memory_and_arithmetic_are_linear(span: Span, backward: bool) -> None:
    with LargestTensor() as largest:
        attention(span, 2048, backward=backward)()
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 4
    short, long = (peak_bytes(attention(span, n, backward=backward)) for n in (2048, 8192))
    assert long < 4.3 * short
    short, long = (flops(attention(span, n, backward=backward)) for n in (4096, 8192))
    assert 0 < long < 2.05 * short
