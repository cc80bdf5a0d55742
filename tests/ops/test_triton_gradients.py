"""Gradients by the kernels of `triton_autograd`, compared with autograd's of the definition and of torch's operations.

They run as `test_triton_kernels` does: on a CUDA device, or on a CPU by Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import linearize
from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.configs.spans import TerracedSpan
from linearize.mixers.feature_maps.learned import Hedgehog
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.backend import TORCH
from linearize.ops.inputs import Blocks, CachedPairs, LinearInputs, LinearState, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.recipe import Recipe
from tests.ops.cases import Case, make_case
from tests.ops.parity import assert_near, part_of
from tests.ops.test_triton_kernels import (
    BLOCKS,
    CACHE,
    DEFINITION,
    DEVICE,
    KERNELS,
    WINDOWS,
    Pool,
    by,
    each_span,
    each_window,
    kernels_alone,
    noted,
    teacher,
)
from tests.oracles.spans import SpanSpec

__all__ = ["kernels_alone"]  # a fixture of every test here, too

TOLERANCE = 1e-5
Fields = tuple[Tensor, ...]


def gradients(function: Callable[..., Fields], *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of a random linear function of all that `function` returns; inputs are detached."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    generator, outputs = torch.Generator().manual_seed(0), function(*leaves)
    weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True))


def assert_gradients_near(found: list[Tensor], expected: list[Tensor], names: str, tolerance: float) -> None:
    for one, other, name in zip(found, expected, names.split(), strict=True):
        assert_near(one.float(), other.float(), tolerance, f"gradient of {name}")


def on_device(case: Case) -> Case:
    return replace(case, **{name: x.float().to(DEVICE) for name, x in case.tensors.items()})


def check_window(case: Case, layout: SequenceLayout | None = None) -> None:
    """Compare gradients through num, den and the running max, each with a random one of its own."""
    case, layout = on_device(case), (case.layout if layout is None else layout).to(DEVICE)
    found = []
    for backend in (KERNELS, DEFINITION):

        def window(q: Tensor, k: Tensor, v: Tensor) -> Fields:
            part = backend.window_softmax(replace(case.softmax(layout), q=q, k=k, v=v))  # noqa: B023
            return part.num, part.den, part.log_scale

        found.append(gradients(window, case.q, case.k, case.v))
    assert_gradients_near(*found, "q k v", TOLERANCE)


# --- softmax ----------------------------------------------------------------------------------------------------------


@each_window
def test_windows_of_packed_documents(span: SpanSpec) -> None:
    check_window(make_case(span, ("packed", "left"), 100, heads=(4, 2, 2), seed=1))


@pytest.mark.parametrize("span", [SpanSpec("sliding", 20), SpanSpec("terraced", 16, 2, sinks=3)], ids=str)
def test_windows_with_a_softcap(span: SpanSpec) -> None:
    check_window(make_case(span, ("full",), 100, heads=(2, 2, 2), softcap=3.0))


@each_window
def test_windows_of_documents_behind_a_carried_one(span: SpanSpec) -> None:
    """One document of the first tokens ends in this call, at once or later, and others follow it."""
    start = 20 if span.window_size < 16 else 75
    case = make_case(span, ("full", "full"), 160, heads=(2, 1, 2), seed=start)
    ends = [[0, start + 50, 130, 160], [0, start, start + 3, 160]]
    documents = [[list(range(*pair)) for pair in pairwise(row)] for row in ends]
    check_window(*part_of(replace(case, documents=documents), start, 160))


def test_windows_of_wide_heads_in_half_precision() -> None:
    """Gradients of rounded inputs are those of the definition, but for the rounding."""
    torch.manual_seed(0)
    case = make_case(SpanSpec("sliding", 20, sinks=2), ("packed",), 100, heads=(2, 1, 2), seed=4)
    tensors, found = [torch.randn(1, h, 100, 128, device=DEVICE).half() for h in (2, 1, 1)], []
    for backend in (KERNELS, DEFINITION):

        def window(q: Tensor, k: Tensor, v: Tensor) -> Fields:
            inputs = SoftmaxInputs(q, k, v, case.package_span, case.layout.to(DEVICE), 0.1)
            part = backend.window_softmax(inputs)  # noqa: B023
            return part.num, part.den, part.log_scale

        found.append(gradients(window, *tensors))
    assert all(x.dtype == torch.float16 for x in found[0])
    assert_gradients_near(*found, "q k v", 2e-3)


def test_the_largest_score_can_be_that_of_several_keys() -> None:
    """One of them gets the gradient of the running max, which is that of all of them for a query."""
    case = make_case(SpanSpec("sliding", 30), ("full",), 70, seed=5)
    case, found = on_device(case.tied(10)), []  # all equal keys are alike in the component that queries look at
    for backend in (KERNELS, DEFINITION):

        def window(q: Tensor) -> Fields:
            part = backend.window_softmax(replace(case.softmax(case.layout.to(DEVICE)), q=q))  # noqa: B023
            return part.num, part.den, part.log_scale

        found.append([gradients(window, case.q)[0][..., :1]])
    assert_gradients_near(*found, "q", TOLERANCE)


@pytest.mark.parametrize("style, softcap", [("full", None), ("packed", 3.0), ("left", None)])
def test_window_and_cache(style: str, softcap: float | None) -> None:
    """Compare gradients of window and pool, which share the running max, for queries of two programs a block."""
    size = 40
    pool = Pool(style, 130, size, TerracedSpan(window_size=20, blocks=2), seed=1)
    layout, blocks = pool.layout.to(DEVICE), Blocks(*(x.to(DEVICE) for x in vars(pool.blocks).values()))
    held, found = pool.chosen(size).to(DEVICE), []
    for backend in (KERNELS, DEFINITION):

        def softmax(q: Tensor, k: Tensor, v: Tensor) -> Fields:
            cached = CachedPairs(k, v, blocks, held)
            inputs = SoftmaxInputs(q, k[:, :, size:], v[:, :, size:], pool.span, layout, 0.4, softcap, cached)
            part = backend.softmax(inputs)  # noqa: B023
            return part.num, part.den, part.log_scale

        found.append(gradients(softmax, pool.q, pool.k, pool.v))
    assert_gradients_near(*found, "q k v", TOLERANCE)


@pytest.mark.others
def test_sums_in_any_order_are_not_for_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = LinearMixer(MixerConfig.model_validate(MIXERS["a KV cache with eviction"]), LayerShape(2, 1, 16, 64, 128))
    inputs, launched = (
        AttnInputs(*torch.randn(3, 1, 1, 70, 16, device=DEVICE).requires_grad_(), 0.25),
        noted(monkeypatch),
    )
    by(monkeypatch, KERNELS)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    mixer.to(DEVICE)(replace(inputs, q=inputs.q.repeat(1, 2, 1, 1))).sum().backward()
    assert launched == ["window", "window_queries", "window_keys"]


def test_gradients_have_no_gradients() -> None:
    case = on_device(make_case(SpanSpec("sliding", 7), ("full",), 40))
    q = case.q.requires_grad_()
    num = KERNELS.window_softmax(replace(case.softmax(case.layout.to(DEVICE)), q=q)).num
    (grad,) = torch.autograd.grad(num.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- the linear part --------------------------------------------------------------------------------------------------


def check_linear(x: LinearInputs) -> None:
    """Compare gradients of features and values, and those of the state, if there is one."""
    state, found = [] if x.state is None else [x.state.S, x.state.z], []
    for backend in (KERNELS, DEFINITION):

        def scan(phi_q: Tensor, phi_k: Tensor, v: Tensor, *before: Tensor) -> Fields:
            own = LinearState(*before) if before else None
            part = backend.linear_scan(replace(x, phi_q=phi_q, phi_k=phi_k, v=v, state=own))  # noqa: B023
            return part.num, part.den

        found.append(gradients(scan, x.queries(), x.phi_k, x.v, *state))
    assert_gradients_near(*found, "phi_q phi_k v" + " S z" * bool(state), TOLERANCE)


@each_span
def test_linear_parts_of_one_document(span: SpanSpec) -> None:
    heads = (4, 2, 2) if span.sinks else (2, 1, 2)
    case = make_case(span, ("left", "right"), 140, heads=heads, seed=7)
    check_linear(on_device(case).linear(case.layout.to(DEVICE)))


@each_span
def test_linear_parts_behind_a_state(span: SpanSpec) -> None:
    start = 9 if span.window_size < 16 else 90
    case = make_case(span, ("full",), 170, heads=(4, 2, 4), seed=start)
    first, layout = part_of(case, 0, start)
    state = linear_state(first.linear(layout))
    case, layout = part_of(case, start, 170)
    state = LinearState(state.S.float().to(DEVICE), state.z.float().to(DEVICE))
    check_linear(on_device(case).linear(layout.to(DEVICE), state))


def test_wide_linear_parts() -> None:
    """Features and values of more than one block."""
    torch.manual_seed(0)
    case = make_case(SpanSpec("terraced", 16, 2, sinks=3), ("left",), 100, heads=(2, 1, 2))
    phi_q, phi_k = (torch.rand(1, 2, 100, 100, device=DEVICE) for _ in range(2))
    v = torch.randn(1, 1, 100, 128, device=DEVICE)
    check_linear(LinearInputs(phi_q, phi_k, v, case.package_span, case.layout.to(DEVICE)))


# --- Hedgehog's maps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["softmax_halves", "softmax", "exp"])
@pytest.mark.parametrize("tied, per", [(False, "query_head"), (False, "kv_head"), (True, "kv_head")])
def test_hedgehogs_maps(activation: str, tied: bool, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients of inputs, weights and biases with those of torch's operations; some features are clamped."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": activation, "tied": tied, "per": per, "bias": True, "init": "kaiming"}
    map_ = Hedgehog(HedgehogMap(**options), LayerShape(4, 2, 72, 64, 128)).to(DEVICE)
    for bias in (map_.query_bias, map_.key_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    position, found, launched = torch.arange(70, device=DEVICE)[None], [], noted(monkeypatch)
    q, k = (10 * torch.randn(2, 70, heads, 72, device=DEVICE).transpose(1, 2) for heads in (4, 2))
    for backend in (KERNELS, TORCH):
        by(monkeypatch, backend)
        map_.zero_grad()
        of_inputs = gradients(lambda q, k: (map_.q(q, position), map_.k(k, position)), q, k)
        phi_q, phi_k = map_.q(q, position), map_.k(k, position)
        (phi_q.sin().sum() + phi_k.cos().sum()).backward()
        found.append([*of_inputs, *(x.grad for x in map_.parameters() if x.grad is not None)])
    names = [name for name, x in map_.named_parameters() if x.grad is not None]
    assert_gradients_near(*found, " ".join(["q", "k", *names]), TOLERANCE)
    assert set(launched) == {"hedgehog", "hedgehog_outputs"}


# --- mixers and models ------------------------------------------------------------------------------------------------

SLIDING = {"span": {"type": "sliding", "window_size": 16}}
EXPONENTIAL = {"feature_map": {"type": "hedgehog", "activation": "exp"}}
MIXERS: dict[str, dict[str, Any]] = {
    "a shared denominator": SLIDING,
    "a shared denominator and sinks": {"span": {"type": "terraced", "window_size": 16, "blocks": 2, "sinks": 3}},
    "one scale": SLIDING | EXPONENTIAL | {"combine": {"type": "absolute_scale"}},
    "a mix": SLIDING | {"combine": {"type": "mix"}},
    "a sum": SLIDING | {"combine": {"type": "add"}},
    "a linear part": {"span": {"type": "none"}},
    "a window": SLIDING | {"feature_map": None, "combine": {"type": "window_only"}},
    "a KV cache with eviction": CACHE | {"feature_map": None, "combine": {"type": "window_only"}},
    "a KV cache with eviction and a linear part": CACHE,
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.others
def test_outputs_of_mixers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients of inputs and parameters through the output with those of torch's operations."""
    torch.manual_seed(0)
    mixer = LinearMixer(MixerConfig.model_validate(MIXERS[name]), LayerShape(4, 2, 24, 64, 128)).to(DEVICE)
    launched, found = noted(monkeypatch), []
    tensors = [torch.randn(2, heads, 80, 24, device=DEVICE) for heads in (4, 2, 2)]
    valid = torch.ones(2, 80, dtype=torch.bool)
    valid[1, :30] = False
    layout = SequenceLayout.from_valid(valid).to(DEVICE)
    names = [part for part, _ in mixer.named_parameters()]
    for backend in (TORCH, KERNELS):
        assert not launched
        by(monkeypatch, backend)

        def output(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Fields:
            inputs, layout_ = AttnInputs(q, k, v, 0.5), layout
            return (torch.func.functional_call(mixer, dict(zip(names, parameters, strict=True)), (inputs, layout_)),)

        found.append(gradients(output, *tensors, *mixer.parameters()))
    assert_gradients_near(*found, " ".join(["q k v", *names]), 2e-5)
    assert {x for x in launched if x not in ("quotient",)}


TRAINED = {
    "a window and a linear part": {
        "hedgehog", "hedgehog_outputs", "window", "linear_states", "linear_outputs", "linear_queries", "linear_keys",
        "linear_values", "window_queries", "window_keys",
    },
    "an eviction cache": {"window", "cached", "window_queries", "window_keys", "cached_pairs"},
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.others
def test_a_model_trains_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all weights are those of other forms."""
    overrides = {"mixer.span.window_size": 16} if "linear" in name else WINDOWS | BLOCKS | {"mixer.cache": {"size": 32}}
    student = linearize.convert(teacher(), Recipe.load("lolcats", overrides))
    student.requires_grad_(True)
    tokens, launched, found = torch.randint(50, (2, 90), device=DEVICE), noted(monkeypatch), []
    for backend in (TORCH, KERNELS):
        assert not launched
        by(monkeypatch, backend)
        student.zero_grad()
        student(tokens, labels=tokens).loss.backward()
        found.append([x.grad for x in student.parameters()])
    assert set(launched) == TRAINED[name]
    names = [part for part, _ in student.named_parameters()]
    assert_gradients_near(*found, " ".join(names), 1e-4)
