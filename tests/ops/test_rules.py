"""Decays and the delta rule: chunks against a recurrence over tokens and against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linearize.configs.spans import SlidingSpan
from linearize.ops import chunk_recurrence, chunked, grid
from linearize.ops.decays import decay_factor
from linearize.ops.inputs import LinearInputs
from linearize.ops.layout import SequenceLayout
from tests.ops.cases import HEADS, RULES, SIDE_BY_SIDE, SINK_SPANS, SPANS, WITH_GAPS, Case, make_case
from tests.ops.parity import (
    FP32_DECAYED,
    FP64,
    assert_near,
    assert_partials_near,
    both_parts,
    carried_state,
    check_chunked,
    outputs_and_gradients,
    part_of,
    written,
)
from tests.ops.recurrence import gently, recurrence
from tests.oracles.spans import SpanSpec

each_rule = pytest.mark.parametrize("rule", RULES[1:])
# Every sixth span always, the others among the slow tests.
each_span = pytest.mark.parametrize(
    "span",
    [
        pytest.param(span, id=str(span), marks=pytest.mark.slow if index % 6 else ())
        for index, span in enumerate(SPANS + SINK_SPANS)
    ],
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of a few heads at a time, so that short sequences cross block boundaries too."""
    monkeypatch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 1)
    monkeypatch.setattr(chunk_recurrence, "BLOCK_SCORES", {"cpu": 3 * 64**2})
    monkeypatch.setattr(chunk_recurrence, "MIN_CHUNKS_PER_BLOCK", 1)


def check_recurrence(case: Case, tolerance: float) -> None:
    """What is written is the recurrence's, and so is what is read."""
    expected, inputs = recurrence(case), written(chunked, case, None, None)
    dtype = inputs.v.dtype
    if case.beta is not None:
        assert_near(inputs.v, expected.u.to(dtype), tolerance, "u")
    part = chunked.linear_scan(inputs)
    assert_near(part.num, expected.num.to(dtype), tolerance, "num")
    assert_near(part.den, expected.den.to(dtype), tolerance, "den")


@each_rule
@each_span
def test_token_by_token(span: SpanSpec, rule: str, small_blocks: None) -> None:
    """Queries that lag behind by a window see erasures up to their state, and decays up to themselves."""
    for heads in (2, 1, 1), (2, 1, 2):
        case = make_case(span, ("full", "packed", "mixed"), 75, heads=heads, seed=4, rule=rule)
        check_recurrence(case, FP64)
        check_recurrence(gently(case), FP64)


@each_rule
@each_span
def test_outputs_and_gradients(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for i, length in enumerate((1, 63, 130, 150)):
        styles = (SIDE_BY_SIDE, WITH_GAPS)[i % 2]
        case = make_case(span, styles, length, heads=HEADS[i], seed=length, rule=rule)
        check_chunked(gently(case), FP64)
    check_chunked(case, FP64)
    check_chunked(case.to(torch.float32), FP32_DECAYED)
    check_chunked(gently(case).to(torch.float32), FP32_DECAYED)


@each_rule
@pytest.mark.parametrize("span", SPANS[::3] + SINK_SPANS[::3], ids=str)
def test_blocks_of_several_chunks_and_heads(span: SpanSpec, rule: str) -> None:
    check_chunked(gently(make_case(span, ("packed", "mixed"), 330, heads=(4, 2, 2), seed=6, rule=rule)), FP64)
    full = make_case(span, ("full", "full"), 330, heads=(2, 1, 2), seed=7, rule=rule)
    check_chunked(full.to(torch.float32), FP32_DECAYED, layout=SequenceLayout.full(330))


@each_rule
@pytest.mark.parametrize("span", [SpanSpec("sliding", 150, sinks=1), SpanSpec("terraced", 70, 3)], ids=str)
def test_windows_of_several_chunks(span: SpanSpec, rule: str) -> None:
    case = gently(make_case(span, ("packed", "full"), 330, heads=(1, 1, 1), seed=3, rule=rule))
    check_chunked(case, FP64)
    check_chunked(case.to(torch.float32), FP32_DECAYED)


@each_rule
@each_span
def test_context_and_a_carried_state(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for start in (3, 60):
        case = make_case(span, ("full", "packed", "interior"), 111, heads=(2, 1, 2), seed=start, rule=rule)
        part, layout = part_of(gently(case), start, case.length)
        check_chunked(part, FP64, layout=layout, state=carried_state(part))


@pytest.mark.parametrize("rule", ["features", "delta scalar"])
def test_one_decay_for_all_rows(rule: str) -> None:
    """Fixed decays have a batch axis of 1, and their gradient is the sum over rows."""
    case = make_case(SpanSpec("sliding", 7), ("full", "full"), 90, rule=rule)
    assert case.log_decay_k is not None
    check_chunked(replace(case, log_decay_k=case.log_decay_k[:1] / 100), FP64)
    check_chunked(replace(case, log_decay_k=case.log_decay_k[:1]), FP64, layout=SequenceLayout.full(90))


def test_a_decay_of_the_head_beside_one_of_the_values() -> None:
    case = make_case(SpanSpec("terraced", 16, 2), ("packed", "mixed"), 150, rule="gates")
    assert case.log_decay_k is not None
    case = replace(case, log_decay_k=case.log_decay_k[..., :1])
    check_chunked(case, FP64)
    check_chunked(gently(case), FP64)


@each_rule
def test_what_lies_in_padding_does_not_matter(rule: str) -> None:
    for span in (SpanSpec("sliding", 1, sinks=1), SpanSpec("sliding", 7, sinks=2), SpanSpec("terraced", 7, 2)):
        case = make_case(span, ("mixed", "left", "interior"), 90, rule=rule)
        assert_partials_near(both_parts(chunked, case.grown(1e6)), both_parts(chunked, case), FP64)


# --- long sequences ---------------------------------------------------------------------------------------------------

DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "mixed": lambda x: torch.where(x < 0.9, 0, torch.where(x < 0.95, -x / 100, -20 * x)),
    "slow": lambda x: -1e-5 * x[:, :, :1].expand_as(x),  # a rounding of each step's factor would add up
    "fast": lambda x: torch.full_like(x, -20),
    "moderate": lambda x: -3 * x,
}


def long_case(span: SpanSpec, rule: str, decay: str, length: int = 4096) -> Case:
    """One row, whose log decays are made of uniform random numbers."""
    case = make_case(span, ("full",), length, heads=(1, 1, 1), seed=8, rule=rule)
    generator = torch.Generator().manual_seed(9)
    uniform = {name: torch.rand(x.shape, generator=generator, dtype=x.dtype) for name, x in case.tensors.items()}
    return replace(case, **{name: DECAYS[decay](uniform[name]) for name, x in case.decays.items() if x is not None})


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    "rule, span",
    [
        ("gates", SpanSpec("none")),
        ("gates", SpanSpec("sliding", 70, 2)),
        ("gates", SpanSpec("terraced", 64, 2)),
        ("delta scalar", SpanSpec("none")),
        ("delta features", SpanSpec("none")),
    ],
    ids=str,
)
def test_4096_steps_in_float32(rule: str, span: SpanSpec, decay: str) -> None:
    case = long_case(span, rule, decay).to(torch.float32)
    expected, ((linear, _), gradients) = recurrence(case), outputs_and_gradients(chunked, case, case.layout, None)
    assert all(x.isfinite().all() for x in gradients.values())
    if case.beta is not None:
        assert_near(written(chunked, case, None, None).v, expected.u.float(), 1e-5, "u")
        return
    assert_near(linear.num, expected.num.float(), 2e-5, "num")
    assert_near(linear.den, expected.den.float(), 2e-5, "den")


def test_a_key_that_decays_at_once_is_read_by_its_own_query_only() -> None:
    case = long_case(SpanSpec("none"), "gates", "fast")
    part = chunked.linear_scan(case.linear())
    own = (case.phi_q * case.phi_k).sum(-1, keepdim=True) * case.v
    assert_near(part.num, own, 1e-6, "num")


def test_writing_the_same_key_fully_replaces_its_value() -> None:
    """beta = 1 and keys of length 1: reading right after writing gives the value back, whatever was there before."""
    case = make_case(SpanSpec("none"), ("full",), 500, heads=(1, 1, 1), seed=3, rule="delta")
    case = replace(case, beta=torch.ones_like(case.v[..., :1]), phi_q=case.phi_k)
    part = chunked.linear_scan(written(chunked, case, None, None))
    assert_near(part.num, case.v, 1e-8, "what was written")


def test_factors_are_neither_denormal_nor_make_denormal_products() -> None:
    for dtype in (torch.float32, torch.float64):
        factor = decay_factor(torch.linspace(-1000, 0, 4001, dtype=dtype))
        assert ((factor == 0) | (factor.square() >= torch.finfo(dtype).tiny)).all()
        assert factor[-1] == 1
        assert (factor[1:] >= factor[:-1]).all()


@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("width", [1, 2], ids=["a decay per head", "a decay per feature"])
def test_the_gradient_of_what_is_0_may_be_too_large_for_the_dtype(length: int, width: int) -> None:
    """Exponentials that are 0 in float32, read by queries that weigh them a lot: decays do not learn of them."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 1, length, 2, generator=draw) for _ in range(3))
    g = 1e9 * torch.rand(1, 1, length, 2, generator=draw)
    log_decay = -torch.rand(1, 1, length, width, generator=draw)

    def gradient(features: int, dtype: torch.dtype) -> Tensor:
        its_q, its_k = torch.zeros(2, 1, 1, length, features)
        its_q[..., :2], its_k[..., :2] = q, k
        its_q[..., 2:] = 1e31
        decay = log_decay if width == 1 else torch.nn.functional.pad(log_decay, (0, features - 2), value=-0.5)
        leaves = [x.to(dtype).requires_grad_() for x in (its_q, its_k, v, decay)]
        layout = SequenceLayout.full(length, torch.device("cpu"))
        part = chunked.linear_scan(LinearInputs(*leaves[:3], SlidingSpan(window_size=5), layout, log_decay_k=leaves[3]))
        return torch.autograd.grad(part.num, leaves, g.to(dtype))[3][..., :width]

    assert_near(gradient(3, torch.float32).double(), gradient(2, torch.float64), 1e-5, "gradient of the decay")
