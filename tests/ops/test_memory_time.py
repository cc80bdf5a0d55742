"""The chunked form takes memory and arithmetic in proportion to T, forward and backward; the definition does not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from linearize.evaluation.speed import peak_bytes
from linearize.mixers.feature_maps.taylor import TaylorKernel
from linearize.ops import chunked, grid, reference
from linearize.ops.layout import Layout
from linearize.ops.span import NoSpan, SlidingSpan, Span, TerracedSpan
from tests.probes import LargestTensor, flops

WINDOW = SlidingSpan()
SPANS = [NoSpan(), WINDOW, SlidingSpan(sinks=4), TerracedSpan()]


def attention(ops: ModuleType, span: Span, length: int, *, backward: bool) -> Callable[[], None]:
    """A call of both primitives (and their backward pass) at a length; H = 2, G = 1, D = F = 16, two documents."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, phi_q, phi_k = (
        torch.rand(1, heads, length, 16, generator=generator).requires_grad_(backward) for heads in (2, 1, 1, 2, 2)
    )
    position = torch.arange(length)[None] % (length // 2 + 5)

    def call() -> None:
        layout = Layout.from_positions(position)
        linear = ops.linear_scan(phi_q, phi_k, v, span=span, layout=layout)
        window = ops.window_softmax(q, k, v, span=span, scaling=0.25, layout=layout)
        if backward:
            sum(x.sum() for x in (linear.num, linear.den, window.num, window.den)).backward()

    return call


each_span = pytest.mark.parametrize("span", SPANS, ids=str)
each_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])


@each_pass
@each_span
def test_no_tensor_is_quadratic(span: Span, backward: bool) -> None:
    with LargestTensor() as largest:
        attention(chunked, span, 2048, backward=backward)()
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 4  # at least the inputs were seen


@each_pass
@each_span
def test_peak_memory_is_linear_in_length(span: Span, backward: bool) -> None:
    short, long = (peak_bytes(attention(chunked, span, n, backward=backward)) for n in (1024, 4096))
    assert long < 4.3 * short


@each_pass
@each_span
def test_arithmetic_is_linear_in_length(span: Span, backward: bool) -> None:
    """Multiply-adds of matrix products; from one block of chunks on, every further one costs the same."""
    short, long = (flops(attention(chunked, span, n, backward=backward)) for n in (4096, 8192))
    assert 0 < long < 2.05 * short


@each_pass
def test_a_kernel_makes_features_of_some_slots_at_a_time(backward: bool) -> None:
    """561 features of 32 inputs, at 8,192 slots."""
    q, k, v = torch.rand(3, 1, 1, 8192, 32).requires_grad_(backward).unbind()
    options = {"span": NoSpan(), "layout": Layout.full(8192)}
    with LargestTensor() as largest:
        linear = chunked.linear_scan(q, k, v, **options, kernel=TaylorKernel())
        if backward:
            (linear.num.sum() + linear.den.sum()).backward()
    assert 8192 * 32 <= largest.elements < 8192 * 561 // 2  # a view of twice as many is counted, too


def test_states_of_all_segments_are_kept_for_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 1)
    x = torch.rand(1, 1, 1024, 256)
    for wanted in (True, False):
        with LargestTensor() as largest:
            chunked.linear_scan(x, x, x.clone().requires_grad_(wanted), span=NoSpan(), layout=Layout.full(1024))
        assert (largest.elements >= 16 * 256 * 256) == wanted


def test_the_definition_is_quadratic() -> None:
    """The measurements can tell."""
    short, long = (attention(reference, WINDOW, n, backward=True) for n in (256, 1024))
    with LargestTensor() as largest:
        long()
    assert largest.elements >= 1024 * 1024
    assert peak_bytes(long) > 10 * peak_bytes(short)
    assert flops(long) > 10 * flops(short)
