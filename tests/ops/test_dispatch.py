"""The choice of an implementation, and what is refused before one is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.base import UserError
from linearize.ops import chunked, dense, dispatch, fla, fused, reference
from linearize.ops.layout import Layout, NoSpan, SlidingSpan
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
    assert dispatch.choose(CPU, None).ops is chunked
    for name in ("dense", "chunked", "reference"):
        monkeypatch.setenv(dispatch.ENVIRONMENT, name)
        assert dispatch.choose(CPU, name).name == name
        assert_partials_near(both_parts(dispatch, case), expected, FP64)


@pytest.mark.parametrize("length", [dense.MOST_KEYS, dense.MOST_KEYS + 1])
def test_up_to_so_many_keys_the_dense_one_serves(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for ops in (dense, chunked):
        for name in ("linear_scan", "window_softmax"):
            work = partial(_noted, called, ops, getattr(ops, name))
            monkeypatch.setattr(ops, name, work)
    case = make_case(SpanSpec("sliding", 7), ("full",), length)
    both_parts(dispatch, case)
    assert called == [dense if length <= dense.MOST_KEYS else chunked] * 2
    called.clear()
    monkeypatch.setattr(dense, "MOST_SCORES", case.q.shape[:3].numel() * length - 1)
    both_parts(dispatch, case)
    assert called == [chunked] * 2


def _noted(called: list[ModuleType], ops: ModuleType, work: Callable[..., Partial], *args: Any, **options: Any) -> Any:
    called.append(ops)
    return work(*args, **options)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "fused")
    with pytest.raises(UserError, match=r"chunked, dense, fla, reference.*'fused'"):
        both_parts(dispatch, make_case(SpanSpec("none"), ("full",), 3))


def test_one_that_cannot_serve_the_device_is_passed_over_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = dispatch.Impl("fused", chunked, lambda device: None if device.type == "cuda" else "needs a GPU")
    monkeypatch.setattr(dispatch, "IMPLS", (fused, *dispatch.IMPLS))
    assert [dispatch.choose(torch.device(x), None).name for x in ("cpu", "cuda")] == ["chunked", "fused"]
    with pytest.raises(UserError, match=r"cpu.*fused: needs a GPU"):
        dispatch.choose(CPU, "fused")


def test_kernels_for_devices_serve_them_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own by themselves, others' where they are asked for by name."""
    device = torch.device("cuda")
    for module, package in ((fla, "fla-core"), (fused, "triton")):
        name = "triton" if module is fused else "fla"
        dispatch.choose.cache_clear()
        with pytest.raises(UserError, match=rf"cpu; found {name}: its kernels are for CUDA devices; unset it"):
            dispatch.choose(CPU, name)
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=rf"{name}: {package} is not installed \(pip install 'linearize\[gpu\]'\)"):
            dispatch.choose(device, name)
    assert dispatch.choose(device, None).ops is chunked
    for module, name in ((fla, "fla"), (fused, "triton")):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
        assert dispatch.choose(device, name).ops is module
    dispatch.choose.cache_clear()
    assert dispatch.choose(device, None).ops is fused
    assert dispatch.choose(CPU, None).ops is chunked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), chunked), ((8, 0), fused)):
        dispatch.choose.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert dispatch.choose(device, None).ops is expected


# --- shapes -----------------------------------------------------------------------------------------------------------


class Untyped(ModuleType):
    """Takes anything, as a kernel for a device may."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        nothing = torch.zeros(1, 2, 5)
        part = Partial(torch.zeros(1, 2, 5, 4), nothing, nothing)
        return lambda *_, **__: part.num if name == "delta_values" else part


def x(heads: int, length: int, width: int) -> Tensor:
    return torch.rand(1, heads, length, width)


FULL = {"span": NoSpan(), "layout": Layout.full(5)}
WINDOW = {"span": SlidingSpan(window_size=2), "layout": Layout.full(5), "scaling": 1.0}
WELL: dict[str, Callable[[], object]] = {
    "scan": lambda: dispatch.linear_scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_k=-x(2, 5, 1), **FULL),
    "delta": lambda: dispatch.delta_values(x(2, 5, 3), x(1, 5, 4), x(2, 5, 1), **FULL),
    "window": lambda: dispatch.window_softmax(x(2, 5, 4), x(1, 5, 4), x(1, 5, 4), **WINDOW),
}
BADLY: dict[str, Callable[[], object]] = {
    "features": lambda: dispatch.linear_scan(x(2, 5, 3), x(2, 5, 2), x(1, 5, 4), **FULL),
    "keys": lambda: dispatch.linear_scan(x(2, 5, 3), x(2, 5, 3), x(1, 4, 4), **FULL),
    "heads of a decay": lambda: dispatch.linear_scan(
        x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_k=-x(3, 5, 1), **FULL
    ),
    "values of a decay": lambda: dispatch.linear_scan(
        x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), log_decay_v=-x(2, 5, 3), **FULL
    ),
    "beta": lambda: dispatch.delta_values(x(2, 5, 3), x(1, 5, 4), x(2, 5, 3), **FULL),
    "values": lambda: dispatch.window_softmax(x(2, 5, 4), x(1, 5, 4), x(1, 5, 3), **WINDOW),
    "an option": lambda: dispatch.linear_scan(x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), decay=-x(2, 5, 1), **FULL),
    "a longer layout": lambda: dispatch.linear_scan(
        x(2, 5, 3), x(2, 5, 3), x(1, 5, 4), span=NoSpan(), layout=Layout.full(7)
    ),
    "a layout of other queries": lambda: dispatch.linear_scan(x(2, 3, 3), x(2, 5, 3), x(1, 5, 4), **FULL),
    "a shorter layout": lambda: dispatch.window_softmax(
        x(2, 5, 4), x(1, 5, 4), x(1, 5, 4), span=SlidingSpan(window_size=2), scaling=1.0, layout=Layout.full(4)
    ),
}


@pytest.mark.parametrize("name", BADLY)
def test_a_wrong_shape_is_refused_before_any_implementation_sees_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By jaxtyping, which tests turn on, and by the layout's own lengths always."""
    monkeypatch.setattr(dispatch, "IMPLS", (dispatch.Impl("untyped", Untyped("untyped")),))
    for call in WELL.values():
        call()
    with pytest.raises((TypeError, AssertionError)):
        BADLY[name]()
