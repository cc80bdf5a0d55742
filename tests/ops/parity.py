"""What the ops promise, each as a function that raises AssertionError when it does not hold.

`test_parity.py` calls them on many cases, `test_mutants.py` calls them on broken ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from types import ModuleType

import torch
from torch import Tensor

from linearize.ops import chunked, reference
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.ops.partial import Partial
from linearize.ops.step import LinearStep, StepContext, linear_step, no_scores, window_step
from tests.ops.cases import DECAYS, INPUTS, Case, own_layout
from tests.oracles.attention import linear_attention_quadratic, window_partial
from tests.oracles.recurrent import RecurrentState, linear_attention_recurrent

FP64, FP32 = 1e-10, 1e-5
FP32_DECAYED = 1e-4  # of sums over steps, which differences of float32 gradients make


def assert_near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Largest difference at most `tolerance` times the largest expected value (in FP64 and FP32_DECAYED, or 1)."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.isfinite().all(), f"{what}: not finite"
    if not expected.numel():
        return
    error, scale = float((found - expected).detach().abs().max()), float(expected.detach().abs().max())
    if tolerance != FP32:
        scale = max(1.0, scale)
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} at a scale of {scale:.3g}"


def both_parts(
    ops: ModuleType, case: Case, layout: SequenceLayout | None = None, state: LinearState | None = None
) -> tuple[Partial, Partial]:
    """(linear, window) of the implementation `ops`."""
    layout = case.layout if layout is None else layout
    return ops.linear_scan(written(ops, case, layout, state)), ops.window_softmax(case.softmax(layout))


def written(ops: ModuleType, case: Case, layout: SequenceLayout | None, state: LinearState | None) -> LinearInputs:
    """The linear part's inputs, with what the delta rule writes instead of values."""
    inputs = case.linear(layout, state)
    return inputs if case.beta is None else inputs.with_values(ops.delta_values(inputs))


def assert_partials_near(found: Sequence[Partial], expected: Sequence[Partial], tolerance: float) -> None:
    for part, one, other in zip(("linear", "window")[: len(found)], found, expected, strict=True):
        for field in ("num", "den", "log_scale"):
            assert_near(getattr(one, field), getattr(other, field), tolerance, f"{part} {field}")


def check_oracle(ops: ModuleType, case: Case) -> None:
    """Both parts of every query equal the loops over keys; padding queries give zeros."""
    linear_num, linear_den = linear_attention_quadratic(case.phi_q, case.phi_k, case.v, case.documents, case.span)
    window = window_partial(
        case.q, case.k, case.v, case.documents, case.span, scaling=case.scaling, softcap=case.softcap
    )
    expected = (Partial(linear_num, linear_den, torch.zeros_like(linear_den)), Partial(*window))
    assert_partials_near(both_parts(ops, case), expected, FP64)


def check_softmax_limit(ops: ModuleType, case: Case) -> None:
    """A span that holds every key is softmax attention (torch's own), with an exactly empty linear part."""
    linear, window = both_parts(ops, case)
    assert not linear.num.any()
    assert not linear.den.any()
    position, document = case.position, (case.position == 0).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]) & (position >= 0)[:, :, None] & (position >= 0)[:, None, :]
    mask &= position[:, None, :] <= position[:, :, None]
    mask |= torch.eye(case.length, dtype=torch.bool)  # a padding query must see something; its output is not compared
    y = torch.nn.functional.scaled_dot_product_attention(
        case.q, case.k, case.v, attn_mask=mask[:, None], scale=case.scaling, enable_gqa=True
    )
    valid = (position >= 0)[:, None, :, None]
    assert_near(window.num / window.den.clamp_min(1e-6)[..., None], y * valid, FP64, "softmax attention")


def carried_state(case: Case, seed: int = 1) -> LinearState:
    """An arbitrary state, as if from an earlier call."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*case.phi_k.shape[:2], case.phi_k.shape[-1])
    S = torch.randn(*shape, case.v.shape[-1], generator=generator, dtype=torch.float64)
    z = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return LinearState(S.to(case.v.dtype), z.to(case.v.dtype))


def outputs_and_gradients(
    ops: ModuleType, case: Case, layout: SequenceLayout, state: LinearState | None
) -> tuple[tuple[Partial, Partial], dict[str, Tensor]]:
    """Both parts, and the gradients of a random linear function of every field that depends on the inputs."""
    leaves = case.tensors
    if state is not None:
        leaves |= {"S": state.S, "z": state.z}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    case = replace(case, **{name: leaves[name] for name in case.tensors})
    state = None if state is None else LinearState(leaves["S"], leaves["z"])
    linear, window = both_parts(ops, case, layout, state)
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros((), dtype=linear.den.dtype)
    for x in (linear.num, linear.den, window.num, window.den, window.log_scale):
        loss = loss + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), gradients, strict=True)
    return (linear, window), {name: torch.zeros_like(x) if g is None else g for (name, x), g in named}


def check_chunked(
    case: Case, tolerance: float, layout: SequenceLayout | None = None, state: LinearState | None = None
) -> None:
    """The chunked form equals the definition: outputs and the gradients of all inputs."""
    layout = case.layout if layout is None else layout
    found, found_gradients = outputs_and_gradients(chunked, case, layout, state)
    expected, expected_gradients = outputs_and_gradients(reference, case, layout, state)
    assert_partials_near(found, expected, tolerance)
    for name, gradient in expected_gradients.items():
        assert_near(found_gradients[name], gradient, tolerance, f"gradient of {name}")


def _states(case: Case) -> list[list[RecurrentState]]:
    """The recurrence's after the last token, of every row and query head."""
    return linear_attention_recurrent(case.phi_q, case.phi_k, case.v, case.documents, case.span)[2]


def check_state(case: Case, rows: list[list[RecurrentState]], state: LinearState, layout: SequenceLayout) -> None:
    """`state` is `rows`, the recurrence's (`_states`), and `layout.count` its number of tokens."""
    ratio = case.phi_q.shape[1] // case.phi_k.shape[1]
    S = torch.stack([torch.stack([one.S for one in row[::ratio]]) for row in rows])
    z = torch.stack([torch.stack([one.z for one in row[::ratio]]) for row in rows])
    assert_near(state.S, S, FP64, "S")
    assert_near(state.z, z, FP64, "z")
    assert layout.count.expand(len(rows)).tolist() == [row[0].steps for row in rows], "tokens counted"
    if case.span.kind != "terraced":
        assert state.next_S is None
        assert state.next_z is None
        return
    assert state.next_S is not None
    assert state.next_z is not None
    folding_age = (case.span.blocks - 1) * case.span.window_size
    next_S, next_z = S.clone(), z.clone()
    for b, row in enumerate(rows):
        for h, one in enumerate(row[::ratio]):
            for position, key, value in one.waiting:
                if position <= one.steps - 1 - folding_age:
                    next_S[b, h] += key[:, None] * value[None, :]
                    next_z[b, h] += key
    assert_near(state.next_S, next_S, FP64, "next S")
    assert_near(state.next_z, next_z, FP64, "next z")


def assert_states_near(found: LinearState, expected: LinearState) -> None:
    for field in fields(LinearState):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert (one is None) == (other is None)
        if one is not None:
            assert_near(one, other, FP64, field.name)


def _carried_slots(case: Case, start: int) -> list[list[int]]:
    """Per row, the slots before `start` of the document that was last there: what an earlier call has seen."""
    before = [[[slot for slot in slots if slot < start] for slots in row] for row in case.documents]
    return [next((slots for slots in reversed(row) if slots), []) for row in before]


def part_of(case: Case, start: int, stop: int) -> tuple[Case, SequenceLayout]:
    """The call for slots start..stop alone, keys preceded by the context that the span asks to keep."""
    layout = own_layout(case.documents, start, stop)
    tensors = {name: x[:, :, start:stop] for name, x in case.tensors.items()}
    if start:
        carried = _carried_slots(case, start)
        seen = torch.tensor([len(slots) for slots in carried])
        layout = layout.with_context(seen, case.package_span)
        context = layout.key_position[:, : layout.key_position.shape[1] - (stop - start)]
        for name, full in case.tensors.items():
            if name in ("q", "phi_q"):
                continue
            # Slots that hold no key are filled with something that would show.
            kept = torch.full((*full.shape[:2], context.shape[1], full.shape[3]), -1e3, dtype=full.dtype)
            for b, slots in enumerate(carried):
                for i, position in enumerate(context[b].tolist()):
                    if position >= 0:
                        kept[b, :, i] = full[b, :, slots[position]]
            tensors[name] = torch.cat([kept, tensors[name]], dim=2)
    documents: list[list[list[int]]] = [[] for _ in case.documents]
    return replace(case, **tensors, documents=documents), layout


def check_split(ops: ModuleType, case: Case, *ways: Sequence[int]) -> None:
    """Several calls, each with the context and the state of the one before, give what one call gives.

    `ways`: places where the sequence is cut, in one way after the other.
    """
    whole, plain = both_parts(reference, case), len(case.tensors) == len(INPUTS)
    if plain:
        rows = _states(case)
    else:
        one_call = linear_state(written(reference, case, None, None))
    for cuts in ways:
        bounds = [0, *sorted(cuts), case.length]
        state: LinearState | None = None
        calls, layout = [], case.layout
        for start, stop in itertools.pairwise(bounds):
            part, layout = part_of(case, start, stop)
            calls.append(both_parts(ops, part, layout, state))
            state = linear_state(written(ops, part, layout, state))
        joined = [
            Partial(*(torch.cat([getattr(x, field) for x in parts], dim=2) for field in ("num", "den", "log_scale")))
            for parts in zip(*calls, strict=True)
        ]
        assert_partials_near(joined, whole, FP64)
        assert state is not None
        if plain:
            check_state(case, rows, state, layout)
        else:
            assert_states_near(state, one_call)


def check_steps(case: Case, start: int) -> None:
    """One-step forms after a first call of `start` slots (every row full) give what one call gives."""
    span = case.package_span
    part, layout = part_of(case, 0, start)
    state = linear_state(written(reference, part, layout, None))
    expected = both_parts(reference, case)
    keys = torch.arange(case.length)[None]
    for n in range(start, case.length):
        position = torch.full((case.q.shape[0],), n)
        entering = slice(max(0, n - span.linear_delay), max(0, n - span.linear_delay) + 1)
        steps = (keys <= n) & (keys >= span.lo(position)[:, None]) & (keys >= span.sinks)
        one = {name: x[:, :, entering] * (n >= span.linear_delay) for name, x in case.tensors.items() if name in DECAYS}
        skipped = {
            f"skipped_{name[-1]}": (x * steps[:, None, :, None]).sum(2, keepdim=True)
            for name, x in case.decays.items()
            if x is not None
        }
        entered = case.phi_k[:, :, entering], case.v[:, :, entering]
        step = LinearStep(case.phi_q[:, :, n : n + 1], state, *entered, **one, **skipped)
        linear, state = linear_step(step, StepContext(span, position))
        found = [linear]
        if span.max_softmax_keys:  # or there is no window to read
            seen = (keys <= n) & ((keys >= span.lo(position)[:, None]) | (keys < span.sinks))
            q, bias = case.q[:, :, n : n + 1], no_scores(~seen, case.q.new_zeros(()))
            softmax = {"bias": bias, "scaling": case.scaling, "softcap": case.softcap}
            found.append(window_step(q, case.k, case.v, **softmax))
        at_n = [Partial(x.num[:, :, [n]], x.den[:, :, [n]], x.log_scale[:, :, [n]]) for x in expected[: len(found)]]
        assert_partials_near(found, at_n, FP64)
    if len(case.tensors) == len(INPUTS):
        check_state(case, _states(case), state, case.layout)
    else:
        assert_states_near(state, linear_state(written(reference, case, None, None)))
