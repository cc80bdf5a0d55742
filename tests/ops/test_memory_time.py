"""The chunked form takes memory and arithmetic in proportion to T, forward and backward; the definition does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from linearize.configs.spans import NoSpan, SlidingSpan, Span, TerracedSpan
from linearize.evaluation.speed import peak_bytes
from linearize.mixers.feature_maps.taylor import TaylorKernel
from linearize.ops import chunked, grid, reference
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from tests.probes import LargestTensor, flops

WINDOW = SlidingSpan()
SPANS = [NoSpan(), WINDOW, SlidingSpan(sinks=4), TerracedSpan()]


def attention(ops: ModuleType, span: Span, length: int, *, backward: bool, rule: str = "none") -> Callable[[], None]:
    """A call of the primitives (and their backward pass) at a length; H = 2, G = 1, D = F = 16, two documents."""
    generator = torch.Generator().manual_seed(0)

    def leaf(heads: int, width: int = 16) -> Tensor:
        return torch.rand(1, heads, length, width, generator=generator).requires_grad_(backward)

    q, k, v, phi_q, phi_k, beta = leaf(2), leaf(1), leaf(1), leaf(2), leaf(2), leaf(2, 1)
    decays = {} if rule == "none" else {"log_decay_k": leaf(2, 1 if rule == "delta scalar" else 16)}
    decays |= {"log_decay_v": leaf(2)} if rule == "gates" else {}
    position = torch.arange(length)[None] % (length // 2 + 5)

    def call() -> None:
        layout = SequenceLayout.from_positions(position)
        keys = LinearInputs(phi_q, phi_k, v, span, layout, **{name: -x for name, x in decays.items()})
        if rule.startswith("delta"):
            keys = replace(keys, phi_k=torch.nn.functional.normalize(phi_k, dim=-1), beta=beta)
            keys = keys.with_values(ops.delta_values(keys))
        linear = ops.linear_scan(keys)
        window = ops.window_softmax(SoftmaxInputs(q, k, v, span, layout, 0.25))
        if backward:
            sum(x.sum() for x in (linear.num, linear.den, window.num, window.den)).backward()

    return call


each_pass = pytest.mark.parametrize(
    "backward",
    [pytest.param(False, id="forward", marks=pytest.mark.slow), pytest.param(True, id="forward and backward")],
)


@each_pass
@pytest.mark.parametrize(
    "rule, span",
    [
        *(("none", span) for span in SPANS),
        *(("gates", span) for span in SPANS[::2]),
        *((rule, NoSpan()) for rule in ("delta scalar", "delta features")),
    ],
    ids=str,
)
def test_memory_and_arithmetic_are_linear(rule: str, span: Span, backward: bool) -> None:
    """Arithmetic: multiply-adds of matrix products. From one block of chunks on, every further one costs the same."""
    with LargestTensor() as largest:
        attention(chunked, span, 2048, backward=backward, rule=rule)()
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 4  # at least the inputs were seen
    calls = {n: attention(chunked, span, n, backward=backward, rule=rule) for n in (2048, 4096, 8192)}
    counted: list[int] = []
    long = peak_bytes(lambda: counted.append(flops(calls[8192])))
    assert long < 4.3 * peak_bytes(calls[2048])
    assert 0 < counted[0] < 2.05 * flops(calls[4096])


@each_pass
def test_a_kernel_makes_features_of_some_slots_at_a_time(backward: bool) -> None:
    """561 features of 32 inputs, at 8,192 slots."""
    q, k, v = torch.rand(3, 1, 1, 8192, 32).requires_grad_(backward).unbind()
    with LargestTensor() as largest:
        linear = chunked.linear_scan(LinearInputs(q, k, v, NoSpan(), SequenceLayout.full(8192), kernel=TaylorKernel()))
        if backward:
            (linear.num.sum() + linear.den.sum()).backward()
    assert 8192 * 32 <= largest.elements < 8192 * 561 // 2  # a view of twice as many is counted, too


def test_states_of_all_segments_are_kept_for_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 1)
    x = torch.rand(1, 1, 1024, 256)
    for wanted in (True, False):
        with LargestTensor() as largest:
            values = x.clone().requires_grad_(wanted)
            chunked.linear_scan(LinearInputs(x, x, values, NoSpan(), SequenceLayout.full(1024)))
        assert (largest.elements >= 16 * 256 * 256) == wanted


def test_the_definition_is_quadratic() -> None:
    """The measurements can tell."""
    short, long = (attention(reference, WINDOW, n, backward=True) for n in (256, 1024))
    with LargestTensor() as largest:
        long()
    assert largest.elements >= 1024 * 1024
    assert peak_bytes(long) > 10 * peak_bytes(short)
    assert flops(long) > 10 * flops(short)
