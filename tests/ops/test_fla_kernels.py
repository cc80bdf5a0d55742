"""The Triton kernels of flash-linear-attention as an implementation, held to the definition.

On a CUDA device, or on a CPU by Triton's interpreter (`make test-fla`), which `TRITON_INTERPRET=1` turns on before
triton is imported: so these tests have a process of their own.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from linearize.ops import chunked, fla, reference
from linearize.ops.layout import Layout
from linearize.ops.linear_state import LinearState, linear_state
from tests.ops.cases import Case, make_case
from tests.ops.parity import FP32_DECAYED, assert_near, assert_partials_near, outputs_and_gradients, part_of
from tests.oracles.spans import SpanSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = FP32_DECAYED if INTERPRETED else 3e-3  # on a device they multiply in TF32
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("there is no CUDA device; `make test-fla` runs this by Triton's interpreter", allow_module_level=True)
pytest.importorskip("fla.ops", reason="fla is not installed; `make test-fla` installs the extra `gpu` and runs this")

# What lies above the diagonal is computed and then masked, here by NumPy, which says when it overflows.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

SPANS = [SpanSpec("none"), SpanSpec("sliding", 1), SpanSpec("sliding", 7), SpanSpec("sliding", 16, sinks=3)]
each_span = pytest.mark.parametrize("span", SPANS, ids=str)
each_rule = pytest.mark.parametrize("rule", ["none", "scalar", "features"])


class _Number(int):
    """An index of a loop, where compiled kernels have a tensor."""

    def to(self, dtype: Any) -> _Number:
        return self


@pytest.fixture(scope="module", autouse=True)
def the_first_configurations() -> Iterator[None]:
    """No configurations are measured, which takes minutes; and what Triton's interpreter lacks: loops over tensors."""
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "_bench", lambda self, *args, **options: [1.0, 1.0, 1.0])
        for name, module in list(sys.modules.items()) if INTERPRETED else []:
            if name.startswith("fla.ops."):
                patch.setattr(
                    module, "range", lambda *ends: map(_Number, builtins.range(*map(int, ends))), raising=False
                )
        yield


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **options: Any) -> None:
        pytest.fail("served by the chunked form")

    monkeypatch.setattr(chunked, "linear_scan", other)


def check(case: Case, layout: Layout | None = None, state: LinearState | None = None) -> None:
    """Outputs and the gradients of all inputs are those of the definition."""
    layout = (case.layout if layout is None else layout).to(DEVICE)
    case = replace(case, **{name: x.to(DEVICE) for name, x in case.tensors.items()})
    state = None if state is None else LinearState(state.S.to(DEVICE), state.z.to(DEVICE))
    (found, _), found_gradients = outputs_and_gradients(fla, case, layout, state)
    (expected, _), gradients = outputs_and_gradients(reference, case, layout, state)
    assert_partials_near([found], [expected], TOLERANCE)
    for name, gradient in gradients.items():
        assert_near(found_gradients[name], gradient, TOLERANCE, f"gradient of {name}")


@each_span
@each_rule
@pytest.mark.parametrize("styles", [("full", "full"), ("packed", "packed")], ids=str)
def test_outputs_and_gradients(span: SpanSpec, rule: str, styles: tuple[str, ...], kernels_alone: None) -> None:
    for length in (5, 130):
        check(make_case(span, styles, length, heads=(4, 2, 2), seed=length, rule=rule).to(torch.float32))


@each_rule
def test_rows_that_are_known_to_be_full(rule: str, kernels_alone: None) -> None:
    case = make_case(SpanSpec("sliding", 7), ("full", "full"), 70, heads=(2, 1, 2), rule=rule).to(torch.float32)
    check(case, Layout.full(70))


@each_span
@each_rule
@pytest.mark.parametrize("start", [4, 40])
def test_a_carried_document_goes_on(span: SpanSpec, rule: str, start: int, kernels_alone: None) -> None:
    """From the state that the first tokens leave, before and after the window is full."""
    case = make_case(span, ("full", "full"), 110, heads=(4, 2, 4), seed=start, rule=rule).to(torch.float32)
    first, layout = part_of(case, 0, start)
    state = linear_state(first.phi_k, first.v, **first.decays, span=case.package_span, layout=layout)
    check(*part_of(case, start, 110), state)


@pytest.mark.parametrize(
    "span, styles, rule",
    [
        (SpanSpec("terraced", 16, 2), ("full",), "none"),
        (SpanSpec("sliding", 7), ("left", "mixed"), "scalar"),
        (SpanSpec("sliding", 7), ("full",), "gates"),
        (SpanSpec("sliding", 7), ("packed",), "delta scalar"),
    ],
    ids=["terraces", "padding", "decays of values", "delta rule"],
)
def test_the_rest_is_the_chunked_form(span: SpanSpec, styles: tuple[str, ...], rule: str) -> None:
    check(make_case(span, styles, 70, heads=(4, 2, 2), rule=rule).to(torch.float32))


@pytest.mark.parametrize("begins", [40, 60], ids=["with this call", "within it"])
def test_documents_that_begin_behind_a_carried_one_are_the_chunked_form(begins: int) -> None:
    case = make_case(SpanSpec("sliding", 7), ("full", "full"), 110, heads=(4, 2, 4), seed=2).to(torch.float32)
    case = replace(case, documents=[[[*range(begins)], [*range(begins, 110)]], [[*range(110)]]])
    first, layout = part_of(case, 0, 40)
    check(*part_of(case, 40, 110), linear_state(first.phi_k, first.v, span=case.package_span, layout=layout))
