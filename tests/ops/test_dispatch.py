"""The choice of a backend, and what is refused before one is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.base import UserError
from linearize.configs.spans import NoSpan, SlidingSpan
from linearize.ops import backend, chunked, dense, dispatch, reference
from linearize.ops.backend import TORCH, Backend, backend_for
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial
from tests.ops.cases import make_case
from tests.ops.parity import FP64, assert_partials_near, both_parts
from tests.oracles.spans import SpanSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten_choices() -> Iterator[None]:
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def test_dense_for_short_rows_chunked_by_default_and_any_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SpanSpec("sliding", 7), ("packed",), 20)
    expected = both_parts(reference, case)
    assert backend_for(CPU) is TORCH
    for name in ("dense", "chunked", "reference"):
        monkeypatch.setenv(dispatch.ENVIRONMENT, name)
        assert backend_for(CPU).name == name
        assert_partials_near(both_parts(backend, case), expected, FP64)


@pytest.mark.parametrize("length", [dense.MOST_KEYS, dense.MOST_KEYS + 1])
def test_up_to_so_many_keys_the_dense_one_serves(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for ops in (dense, chunked):
        for name in ("linear_scan", "window_softmax"):
            work = partial(_noted, called, ops, getattr(ops, name))
            monkeypatch.setattr(ops, name, work)
    case = make_case(SpanSpec("sliding", 7), ("full",), length)
    both_parts(backend, case)
    assert called == [dense if length <= dense.MOST_KEYS else chunked] * 2
    called.clear()
    monkeypatch.setattr(dense, "MOST_SCORES", case.q.shape[:3].numel() * length - 1)
    both_parts(backend, case)
    assert called == [chunked] * 2


def _noted(called: list[ModuleType], ops: ModuleType, work: Callable[..., Partial], *args: Any, **options: Any) -> Any:
    called.append(ops)
    return work(*args, **options)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "fused")
    with pytest.raises(UserError, match=r"triton, torch, chunked, dense, reference; found 'fused'"):
        both_parts(backend, make_case(SpanSpec("none"), ("full",), 3))


def test_our_kernels_serve_gpus_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    with pytest.raises(UserError, match="cpu; found triton: its kernels are for CUDA devices; unset it"):
        dispatch.choose(CPU, "triton")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"triton: triton is not installed \(pip install 'linearize\[gpu\]'\)"):
        dispatch.choose(device, "triton")
    assert dispatch.choose(device, None) == "torch"
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    assert dispatch.choose(device, "triton") == "triton"
    dispatch.choose.cache_clear()
    assert dispatch.choose(device, None) == "triton"
    assert dispatch.choose(CPU, None) == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), "torch"), ((8, 0), "triton")):
        dispatch.choose.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert dispatch.choose(device, None) == expected


def test_compilers_see_operations_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    assert backend_for(torch.device("cuda")).name == "triton"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert backend_for(torch.device("cuda")) is TORCH


# --- shapes -----------------------------------------------------------------------------------------------------------


class Untyped(ModuleType):
    """Takes anything, as a kernel for a device may."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        nothing = torch.zeros(1, 2, 5)
        part = Partial(torch.zeros(1, 2, 5, 4), nothing, nothing)
        return lambda *_, **__: part.num if name == "delta_values" else part


def x(heads: int, length: int, width: int) -> Tensor:
    return torch.rand(1, heads, length, width)


def scan(phi_q: Tensor, phi_k: Tensor, v: Tensor, layout: SequenceLayout | None = None, **rules: Any) -> object:
    layout = SequenceLayout.full(5) if layout is None else layout
    return backend.linear_scan(LinearInputs(phi_q, phi_k, v, NoSpan(), layout, **rules))


def window(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None = None) -> object:
    layout = SequenceLayout.full(5) if layout is None else layout
    return backend.window_softmax(SoftmaxInputs(q, k, v, SlidingSpan(window_size=2), layout, 1.0))


def delta(phi_k: Tensor, v: Tensor, beta: Tensor) -> object:
    return backend.prefill(None, LinearInputs(x(2, 5, 3), phi_k, v, NoSpan(), SequenceLayout.full(5), beta))


WELL: dict[str, Callable[[], object]] = {
    "scan": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_k=-x(2, 5, 1)),
    "delta": lambda: delta(x(2, 5, 3), x(1, 5, 4), x(2, 5, 1)),
    "window": lambda: window(x(2, 5, 4), x(1, 5, 4), x(1, 5, 4)),
}
BADLY: dict[str, Callable[[], object]] = {
    "features": lambda: scan(x(2, 5, 3), x(2, 5, 2), x(1, 5, 4)),
    "keys": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 4, 4)),
    "heads of a decay": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_k=-x(3, 5, 1)),
    "values of a decay": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_v=-x(2, 5, 3)),
    "beta": lambda: delta(x(2, 5, 3), x(1, 5, 4), x(2, 5, 3)),
    "values": lambda: window(x(2, 5, 4), x(1, 5, 4), x(1, 5, 3)),
    "an option": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), decay=-x(2, 5, 1)),
    "a longer layout": lambda: scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), SequenceLayout.full(7)),
    "a layout of other queries": lambda: scan(x(2, 3, 3), x(2, 5, 3), x(1, 5, 4)),
    "a shorter layout": lambda: window(x(2, 5, 4), x(1, 5, 4), x(1, 5, 4), SequenceLayout.full(4)),
}


@pytest.mark.parametrize("name", BADLY)
def test_a_wrong_shape_is_refused_before_any_implementation_sees_it(
    name: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Check the annotations by jaxtyping, where it is turned on."""
    if not pytestconfig.getoption("jaxtyping_packages"):
        pytest.skip("annotated shapes are checked by `make test` and `make test-shapes`")
    monkeypatch.setattr(backend, "backend_for", lambda device: Backend("untyped", Untyped("untyped")))
    for call in WELL.values():
        call()
    with pytest.raises((TypeError, AssertionError)):
        BADLY[name]()
