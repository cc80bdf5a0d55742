"""The chunked form takes memory and arithmetic in proportion to T, forward and backward; the definition does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from linearize.ops import chunked, reference
from linearize.ops.layout import Layout
from linearize.ops.span import NoSpan, SlidingSpan, Span, TerracedSpan

SPANS = [NoSpan(), NoSpan(sinks=4), SlidingSpan(64), SlidingSpan(64, sinks=4), TerracedSpan(64, 2)]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, autograd's own operations included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


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


def peak_bytes(call: Callable[[], None], folder: Path) -> int:
    """Most bytes allocated at once beyond what stood before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    trace = folder / "trace.json"
    recorded.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def flops(call: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


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
def test_peak_memory_is_linear_in_length(span: Span, backward: bool, tmp_path: Path) -> None:
    short, long = (peak_bytes(attention(chunked, span, n, backward=backward), tmp_path) for n in (1024, 4096))
    assert long < 4.3 * short


@each_pass
@each_span
def test_arithmetic_is_linear_in_length(span: Span, backward: bool) -> None:
    """Multiply-adds of matrix products; from one block of chunks on, every further one costs the same."""
    short, long = (flops(attention(chunked, span, n, backward=backward)) for n in (4096, 8192))
    assert 0 < long < 2.05 * short


def test_the_definition_is_quadratic(tmp_path: Path) -> None:
    """The measurements can tell."""
    short, long = (attention(reference, SlidingSpan(64), n, backward=True) for n in (256, 1024))
    with LargestTensor() as largest:
        long()
    assert largest.elements >= 1024 * 1024
    assert peak_bytes(long, tmp_path) > 10 * peak_bytes(short, tmp_path)
    assert flops(long) > 10 * flops(short)
