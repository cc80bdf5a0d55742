"""What every mixer promises, each as a function that raises AssertionError when it does not hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from linearize.configs.mixer_parts import Add, AdditiveUpdate
from linearize.configs.spans import NoSpan, Span
from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import MixerState
from linearize.ops import chunked, dense, dispatch, grid
from linearize.ops.layout import SequenceLayout, slot_positions
from tests.mixers.space import Drawn, pieces, with_tensors
from tests.mixers.weights import weights_of
from tests.ops.cases import own_layout
from tests.oracles.heads import Inputs
from tests.oracles.mixer import bidirectional_layer, mixer_layer

FP64, FP32 = 1e-10, 1e-4
Case = TypeVar("Case")


def check_draws(check: Callable[[Case], None], cases: SearchStrategy[Case], examples: int) -> None:
    """Check so many draws, alike on every run."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=health)
    @given(cases)
    def on_each(case: Case) -> None:
        check(case)

    on_each()


def assert_near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Largest difference at most `tolerance` times the largest expected value, or 1 where that is less."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.isfinite().all(), f"{what}: not finite"
    if expected.numel():
        error, scale = float((found - expected).detach().abs().max()), float(expected.detach().abs().max())
        assert error <= tolerance * max(1.0, scale), f"{what}: off by {error:.3g} at a scale of {scale:.3g}"


def check_oracle(case: Drawn) -> None:
    """The whole layer equals the loops transcribed from the papers."""
    x = case.inputs
    inputs = Inputs(x.q, x.k, x.v, x.scaling, x.softcap, x.hidden, x.unrotated, x.rope)
    expected = mixer_layer(case.mixer.config, weights_of(case.mixer), inputs, case.documents)
    assert_near(case.mixer(x, case.layout), expected, FP64, "output")


def check_bidirectional(case: Drawn) -> None:
    """The encoder's mixer with the same map and normalizer equals its oracle."""
    config = case.mixer.config.model_copy(update={"span": NoSpan(), "decay": None, "combine": Add()})
    config = config.model_copy(update={"update": AdditiveUpdate()})
    mixer = BidirectionalMixer(config, case.mixer.shape).double()
    mixer.load_state_dict(case.mixer.state_dict(), strict=False)
    mixer.requires_grad_(False)
    x = case.inputs
    inputs = Inputs(x.q, x.k, x.v, x.scaling, x.softcap, x.hidden, x.unrotated, x.rope)
    expected = bidirectional_layer(config, weights_of(mixer), inputs, case.documents)
    assert_near(mixer(x, case.layout), expected, FP64, "output")
    with torch.device("meta"):
        assert BidirectionalMixer(config, case.mixer.shape).double()(x.map(lambda x: x.to("meta"))).is_meta


def check_meta(case: Drawn) -> None:
    """On the meta device a mixer has its parameters, and after one token its state, in their sizes."""
    inputs = case.part(0, 1)
    with torch.device("meta"):
        mixer = LinearMixer(case.mixer.config, case.mixer.shape).double()
    y, state = mixer.step(inputs.map(lambda x: x.to("meta")), None)
    _, expected = case.mixer.step(inputs, None)
    assert y.is_meta and all(x.is_meta for x in state.tensors()) and state.nbytes == expected.nbytes
    found = mixer.state_dict() | state.named_tensors()
    real = case.mixer.state_dict() | expected.named_tensors()
    assert [(name, x.shape, x.dtype) for name, x in found.items()] == [(n, x.shape, x.dtype) for n, x in real.items()]


def outputs_and_gradients(case: Drawn, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and gradients of a random linear function of them in all inputs and parameters."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    weights = {name: x.detach().requires_grad_() for name, x in case.mixer.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.ENVIRONMENT, implementation)
        arguments = with_tensors(case.inputs, leaves), case.layout
        y = torch.func.functional_call(case.mixer, weights, arguments)
        generator = torch.Generator().manual_seed(2)
        loss = (y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)).sum()
        named = leaves | weights
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return y.detach(), {
        name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(named.items(), gradients, strict=True)
    }


def check_chunked(case: Drawn, tolerance: float = FP64) -> None:
    """The other forms equal the definition: outputs and gradients of all inputs and parameters."""
    expected, expected_gradients = outputs_and_gradients(case, "reference")
    for form in ("chunked", "dense"):
        found, found_gradients = outputs_and_gradients(case, form)
        assert_near(found, expected, tolerance, f"{form}: output")
        for name, gradient in expected_gradients.items():
            assert_near(found_gradients[name], gradient, tolerance, f"{form}: gradient of {name}")


def in_calls(case: Drawn, cuts: Sequence[int]) -> tuple[Tensor, MixerState]:
    """Outputs of `step` over the pieces between the cuts, and the last state."""
    state: MixerState | None = None
    outputs = []
    for start, stop in pieces(case.length, cuts):
        layout = own_layout(case.documents, start, stop)
        goes_on = bool((layout.key_position >= 0).all()) and not bool(layout.key_document.any())
        y, state = case.mixer.step(case.part(start, stop), state, None if goes_on and state else layout)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=2), state


def check_calls(case: Drawn, cuts: Sequence[int]) -> None:
    """Several calls, one token at a time among them, give the outputs and the final state of one call."""
    found, found_state = in_calls(case, cuts)
    assert_near(found, case.mixer(case.inputs, case.layout), FP64, "output")
    expected_state = in_calls(case, [])[1]
    absorbed = case.mixer.absorb(case.inputs, None, case.layout)
    for index, (one, other) in enumerate(zip(absorbed.tensors(), expected_state.tensors(), strict=True)):
        assert_near(
            one.masked_fill(one == -math.inf, 0), other.masked_fill(other == -math.inf, 0), FP64, f"state {index}"
        )
    empty = case.mixer.state_like(case.part(0, 1))
    assert [x.shape for x in empty.tensors()] == [x.shape for x in expected_state.tensors()]
    assert_near(found_state.seen, expected_state.seen, 0, "tokens seen")
    assert_same_state(found_state, expected_state, case.mixer.span)


def assert_same_state(found: MixerState, expected: MixerState, span: Span) -> None:
    """Equal in all that later queries read; a slot below every later query's window may hold a token or not."""
    seen = expected.seen[:, None]
    position = slot_positions(seen[:, 0], span)
    needed = (position >= 0) & ((position >= span.lo(seen - 1)) | (position < span.sinks))
    for name, x in expected.slots.items():
        every = torch.ones(len(needed), x.shape[2] - needed.shape[1], dtype=torch.bool)  # of an eviction cache
        mask = torch.cat([needed, every], dim=1)[:, None, :, None]
        assert_near(found.slots[name] * mask, x * mask, FP64, f"slots of {name}")
    rest = (replace(state, slots={}).tensors() for state in (found, expected))
    for index, (one, other) in enumerate(zip(*rest, strict=True)):
        unset = -math.inf  # a maximum before the first token
        assert_near(one.masked_fill(one == unset, 0), other.masked_fill(other == unset, 0), FP64, f"state {index}")


def check_short_prompts(case: Drawn, cuts: Sequence[int]) -> None:
    """What short rows go through where no gradients are wanted; prompts of whole documents, of every length."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dense, "MOST_KEYS", 256)
        check_calls(case, cuts)
        whole = case.mixer(case.inputs)
        for length in range(1, case.length + 1):
            y, state = case.mixer.step(case.part(0, length), None)
            assert_near(y, whole[:, :, :length], FP64, f"output of {length}")
            layout = replace(SequenceLayout.full(length), uniform=False, _known={})
            expected = case.mixer.step(case.part(0, length), None, layout)[1]
            for index, (one, other) in enumerate(zip(state.tensors(), expected.tensors(), strict=True)):
                assert_near(one, other, FP64, f"state {index} after {length}")


def check_segments(case: Drawn) -> None:
    """Without gradients, rows of whole documents are worked on in segments: the same outputs and final state."""
    expected, expected_state = case.mixer.step(case.inputs, None, case.layout)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LinearMixer, "_segment", lambda self, inputs: 16)
        assert_near(case.mixer(case.inputs), expected, FP64, "output")
        found, found_state = case.mixer.step(case.inputs, None)
    assert_near(found, expected, FP64, "output of a step")
    assert_same_state(found_state, expected_state, case.mixer.span)


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    """Short sequences cross chunk and block boundaries too, and none is too short for chunks."""
    patch.setattr(dense, "MOST_KEYS", 0)
    patch.setattr(chunked, "CHUNK", 16)
    patch.setattr(chunked, "WINDOW_CHUNK", 16)
    patch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 2)
