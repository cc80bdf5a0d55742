"""The values of the delta rule, against a recurrence over tokens and against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linearize.evaluation.speed import peak_bytes
from linearize.ops import chunk_recurrence, delta, reference, vector_decay
from linearize.ops.layout import Layout
from linearize.ops.linear_state import LinearState
from linearize.ops.span import NoSpan
from tests.ops.cases import HEADS, SIDE_BY_SIDE, SINK_SPANS, SPANS, WITH_GAPS, Case, make_case
from tests.ops.parity import FP64, assert_near, carried_state, part_of
from tests.ops.recurrence import assert_all_near, gently, recurrence, with_gradients
from tests.oracles.spans import SpanSpec
from tests.probes import LargestTensor, flops

RULES = ("delta", "delta scalar", "delta features")
FP32 = 1e-4
LEAVES = ("phi_k", "v", "beta", "log_decay_k")

each_rule = pytest.mark.parametrize("rule", RULES)
# What is written depends on the sinks, but not on the window.
each_span = pytest.mark.parametrize("span", [SPANS[0], SPANS[2], SPANS[6], *SINK_SPANS[::3]], ids=str)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of a few heads at a time, so that short sequences cross block boundaries too."""
    monkeypatch.setattr(chunk_recurrence, "BLOCK_SCORES", {"cpu": 3 * 64**2})
    monkeypatch.setattr(chunk_recurrence, "MIN_CHUNKS_PER_BLOCK", 1)


def written(ops, case: Case, layout: Layout, state: LinearState | None = None) -> Tensor:
    """u of the module `ops`."""
    options = {"span": case.package_span, "layout": layout, "state": state}
    return ops.delta_values(case.phi_k, case.v, case.beta, log_decay_k=case.log_decay_k, **options)


def check(case: Case, tolerance: float, layout: Layout | None = None, state: LinearState | None = None) -> None:
    """Values and all gradients are those of the definition."""
    layout = case.layout if layout is None else layout
    found, expected = (
        with_gradients(lambda case, state, ops=ops: [written(ops, case, layout, state)], case, LEAVES, state)
        for ops in (delta, reference)
    )
    assert_all_near(found, expected, tolerance)


@each_rule
@each_span
def test_token_by_token(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for heads, styles in ((2, 1, 2), ("full", "packed")), ((2, 1, 1), ("mixed", "left")):
        case = make_case(span, styles, 75, heads=heads, seed=4, rule=rule)
        for one in (case, gently(case)):
            assert_near(written(delta, one, one.layout), recurrence(one).u, FP64, "u")


@each_rule
@each_span
def test_the_scan_of_what_is_written_is_the_delta_rule(span: SpanSpec, rule: str) -> None:
    """Queries that lag behind by a window see erasures up to their state, and decays up to themselves."""
    case = gently(make_case(span, ("full", "mixed"), 90, heads=(2, 1, 2), seed=5, rule=rule))
    expected = recurrence(case)
    options = {"span": case.package_span, "layout": case.layout}
    u = written(delta, case, case.layout)
    partial = vector_decay.linear_scan(case.phi_q, case.phi_k, u, log_decay_k=case.log_decay_k, **options)
    assert_near(partial.num, expected.num, FP64, "num")
    assert_near(partial.den, expected.den, FP64, "den")


@each_rule
@each_span
def test_values_and_gradients(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for i, length in enumerate((1, 63, 130, 150)):
        styles = (SIDE_BY_SIDE, WITH_GAPS)[i % 2]
        case = make_case(span, styles, length, heads=HEADS[i], seed=length, rule=rule)
        check(gently(case), FP64)
    check(case, FP64)
    check(case.to(torch.float32), FP32)
    check(gently(case).to(torch.float32), FP32)


@each_rule
def test_blocks_of_several_chunks_and_heads(rule: str) -> None:
    case = make_case(SpanSpec("sliding", 1, sinks=3), ("packed", "mixed"), 330, heads=(4, 2, 2), seed=6, rule=rule)
    check(gently(case), FP64)
    full = make_case(SpanSpec("none"), ("full", "full"), 330, heads=(2, 1, 2), seed=7, rule=rule)
    check(full.to(torch.float32), FP32, layout=Layout.full(330))


@each_rule
@each_span
def test_with_context_and_a_carried_state(span: SpanSpec, rule: str, small_blocks: None) -> None:
    for start in (1, 5, 40, 100):
        case = make_case(span, ("full", "packed", "interior"), 111, heads=(2, 1, 2), seed=start, rule=rule)
        part, layout = part_of(gently(case), start, case.length)
        check(part, FP64, layout=layout, state=carried_state(part))


def test_one_decay_for_all_rows() -> None:
    case = make_case(SpanSpec("none"), ("full", "full"), 90, rule="delta scalar")
    assert case.log_decay_k is not None
    check(replace(case, log_decay_k=case.log_decay_k[:1] / 100), FP64, layout=Layout.full(90))


def test_what_lies_in_padding_does_not_matter() -> None:
    for rule in RULES:
        case = make_case(SpanSpec("sliding", 1, sinks=1), ("mixed", "left", "interior"), 90, rule=rule)
        assert_near(
            written(delta, case.grown(1e6), case.layout), written(delta, case, case.layout), FP64, "with other padding"
        )


# --- long sequences ---------------------------------------------------------------------------------------------------

DECAYS = {
    "none": torch.zeros_like,
    "mixed": lambda x: torch.where(x < 0.9, 0, torch.where(x < 0.95, -x / 100, -20 * x)),
    "fast": lambda x: torch.full_like(x, -20),
    "moderate": lambda x: -3 * x,
}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("decay", DECAYS)
def test_4096_steps_in_float32(decay: str, width: int) -> None:
    case = make_case(SpanSpec("none"), ("full",), 4096, heads=(1, 1, 1), seed=8, rule="delta scalar")
    uniform = torch.rand(1, 1, 4096, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    case = replace(case, log_decay_k=DECAYS[decay](uniform)).to(torch.float32)
    found = with_gradients(lambda case, state: [written(delta, case, case.layout)], case, LEAVES, None)
    assert_near(found["output 0"], recurrence(case).u.float(), 1e-5, "u")
    assert all(x.isfinite().all() for x in found.values())


def test_writing_the_same_key_fully_replaces_its_value() -> None:
    """beta = 1 and keys of length 1: reading right after writing gives the value back, whatever was there before."""
    case = make_case(SpanSpec("none"), ("full",), 500, heads=(1, 1, 1), seed=3, rule="delta")
    case = replace(case, beta=torch.ones_like(case.v[..., :1]), phi_q=case.phi_k)
    u = written(delta, case, case.layout)
    partial = vector_decay.linear_scan(case.phi_q, case.phi_k, u, span=NoSpan(), layout=case.layout)
    assert_near(partial.num, case.v, 1e-8, "what was written")


def call_of(width: int, length: int, *, backward: bool) -> Callable[[], None]:
    """A call at a length; H = 2, G = 1, D = F = 16, two documents."""
    generator = torch.Generator().manual_seed(0)
    k, v, beta, log_decay = (
        torch.rand(1, heads, length, x, generator=generator) for heads, x in ((2, 16), (1, 16), (2, 1), (2, width))
    )
    leaves = [x.requires_grad_(backward) for x in (torch.nn.functional.normalize(k, dim=-1), v, beta, -log_decay)]
    position = torch.arange(length)[None] % (length // 2 + 5)

    def call() -> None:
        k, v, beta, log_decay = leaves
        layout = Layout.from_positions(position)
        u = delta.delta_values(k, v, beta, log_decay_k=log_decay, span=NoSpan(), layout=layout)
        if backward:
            u.sum().backward()

    return call


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("width", [1, 16])
def test_memory_and_arithmetic_are_linear(width: int, backward: bool) -> None:
    with LargestTensor() as largest:
        call_of(width, 2048, backward=backward)()
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 4
    short, long = (peak_bytes(call_of(width, n, backward=backward)) for n in (2048, 8192))
    assert long < 4.3 * short
    short, long = (flops(call_of(width, n, backward=backward)) for n in (4096, 8192))
    assert 0 < long < 2.05 * short
