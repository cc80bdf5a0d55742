"""Ops that are given a kernel in closed form do what they do with its features."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.mixers.feature_maps.taylor import TaylorKernel
from linearize.ops import chunked, dense, grid, reference
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.kernel import Kernel
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.ops.step import LinearStep, StepContext, linear_step
from tests.ops.cases import SIDE_BY_SIDE, SINK_SPANS, SPANS, WITH_GAPS, Case, make_case
from tests.ops.parity import FP32, FP64, assert_near, assert_states_near, part_of
from tests.oracles.spans import SpanSpec

TAYLOR = TaylorKernel()
SLIDING = SpanSpec("sliding", 7)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several chunks, and several blocks."""
    monkeypatch.setattr(chunked, "MAX_CHUNK", 16)
    monkeypatch.setattr(sys.modules[linear_state.__module__], "SLOTS_AT_ONCE", 16)
    monkeypatch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 2)


def outputs_and_gradients(
    scan: Callable[..., Any], case: Case, layout: SequenceLayout, state: LinearState | None, kernel: Kernel | None
) -> dict[str, Tensor]:
    """num, den and the gradients of the kernel's inputs, which without a `kernel` become features here."""
    leaves = {"phi_q": case.phi_q, "phi_k": case.phi_k, "v": case.v}
    leaves |= {} if state is None else {"S": state.S, "z": state.z}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    phi_q, phi_k, v, *carried = leaves.values()
    if kernel is None:
        phi_q, phi_k = TAYLOR.features(phi_q), TAYLOR.features(phi_k)
    state = LinearState(*carried) if carried else None
    found = scan(LinearInputs(phi_q, phi_k, v, case.package_span, layout, kernel=kernel, state=state))
    generator = torch.Generator().manual_seed(2)
    weights = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (found.num, found.den))
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip((found.num, found.den), weights, strict=True))
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), gradients, strict=True)
    gradient_of = {f"gradient of {name}": torch.zeros_like(x) if g is None else g for (name, x), g in named}
    return {"num": found.num, "den": found.den} | gradient_of


def check(
    ops: ModuleType,
    case: Case,
    tolerance: float = FP64,
    layout: SequenceLayout | None = None,
    state: LinearState | None = None,
    kernel: Kernel = TAYLOR,
) -> None:
    """Outputs and gradients are those that the definition has with features."""
    layout = case.layout if layout is None else layout
    expected = outputs_and_gradients(reference.linear_scan, case, layout, state, None)
    for name, x in outputs_and_gradients(ops.linear_scan, case, layout, state, kernel).items():
        assert_near(x, expected[name], tolerance, name)


def carried_state(case: Case) -> LinearState:
    generator = torch.Generator().manual_seed(1)
    features = TAYLOR.features(case.phi_k[:, :, 0])
    S = torch.randn(*features.shape, case.v.shape[-1], generator=generator, dtype=torch.float64)
    return LinearState(S, S.abs().sum(-1))


@pytest.mark.parametrize("ops", [reference, chunked, dense], ids=["reference", "chunked", "dense"])
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_outputs_and_gradients_are_those_of_features(span: SpanSpec, ops: ModuleType) -> None:
    for length in (1, 16, 17, 75):
        for styles in (SIDE_BY_SIDE, WITH_GAPS):
            case = make_case(span, styles, length, heads=(4, 2, 2), seed=length)
            check(ops, case)
            check(ops, case.to(torch.float32), FP32)
        check(ops, make_case(span, ("full", "full"), length, seed=length), layout=SequenceLayout.full(length))


@pytest.mark.parametrize("ops", [reference, chunked, dense], ids=["reference", "chunked", "dense"])
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_context_and_a_carried_state(span: SpanSpec, ops: ModuleType) -> None:
    for start in (1, 20, 49):
        case, layout = part_of(make_case(span, ("full", "packed", "mixed"), 70, heads=(4, 2, 2)), start, 70)
        check(ops, case, layout=layout, state=carried_state(case))


@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_states_and_steps_are_those_of_features(span: SpanSpec) -> None:
    case = make_case(span, ("full", "full"), 40, heads=(4, 2, 2))
    given = case.linear()
    before = linear_state(replace(given, kernel=TAYLOR))
    expected = linear_state(replace(given, phi_q=None, phi_k=TAYLOR.features(case.phi_k)))
    assert_states_near(before, expected)
    phi_q, phi_k, v = (x[:, :, -1:] for x in (case.phi_q, case.phi_k, case.v))
    at = StepContext(case.package_span, torch.tensor([40, 40]))
    found = linear_step(LinearStep(phi_q, before, phi_k, v, kernel=TAYLOR), at)
    with_features = linear_step(LinearStep(TAYLOR.features(phi_q), expected, TAYLOR.features(phi_k), v), at)
    assert_near(found[0].num, with_features[0].num, FP64, "num")
    assert_near(found[0].den, with_features[0].den, FP64, "den")
    assert_states_near(found[1], with_features[1])


def test_features_and_their_gradient() -> None:
    """Even and odd numbers of inputs; the gradient against autograd's."""
    for inputs in range(1, 8):
        x, y = torch.randn(2, 3, 5, inputs, dtype=torch.float64).requires_grad_()
        features = TAYLOR.features(x)
        u = (x @ y.mT).detach().requires_grad_()
        assert features.shape[-1] == (inputs + 1) * (inputs + 2) // 2
        assert_near(features @ TAYLOR.features(y).mT, TAYLOR.scores(u), FP64, "scores")
        (slope,) = torch.autograd.grad(TAYLOR.scores(u).sum(), u)
        assert_near(TAYLOR.slope(u), slope, FP64, "slope")
        grad = torch.randn_like(features)
        (expected,) = torch.autograd.grad(features, x, grad)
        assert_near(TAYLOR.features_grad(x, grad), expected, FP64, "features_grad")
        assert torch.autograd.gradcheck(TAYLOR.features, x)


class FlatSlope(TaylorKernel):
    def slope(self, u: Tensor) -> Tensor:
        return torch.ones_like(u)


class NoFeaturesGrad(TaylorKernel):
    def features_grad(self, x: Tensor, grad: Tensor) -> Tensor:
        return torch.zeros_like(x)


class FirstOrder(TaylorKernel):
    def scores(self, u: Tensor) -> Tensor:
        return 1 + u


@pytest.mark.parametrize("kernel", [FlatSlope(), NoFeaturesGrad(), FirstOrder()], ids=lambda k: type(k).__name__)
def test_a_wrong_kernel_is_caught(kernel: Kernel) -> None:
    case = make_case(SLIDING, ("full",), 75)
    check(chunked, case)
    with pytest.raises(AssertionError):
        check(chunked, case, kernel=kernel)


def test_features_of_slots_without_a_key_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """phi(0) is not 0: in front of a sequence whose keys a window delays, and behind one, are slots without keys."""
    case = make_case(SLIDING, ("full",), 75)
    check(chunked, case, layout=SequenceLayout.full(75))
    masks = chunked._LinearScan.masks

    def wrong(self: chunked._LinearScan, *where) -> Any:
        with_features = copy.copy(self)
        with_features.kernel = None
        return masks(with_features, *where)

    monkeypatch.setattr(chunked._LinearScan, "masks", wrong)
    with pytest.raises(AssertionError):
        check(chunked, case, layout=SequenceLayout.full(75))
