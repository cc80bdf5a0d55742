"""The backend of our Triton kernels for NVIDIA GPUs.

There are kernels for Hedgehog's maps, window, additive linear part, KV caches and one more token. On a short prompt a
GPU operation takes less time than its launch, and the chunked forms launch hundreds per layer. Window, cache, linear
part and maps have backward passes (`triton_autograd`). The output and the one-token step use kernels only if no
gradient is wanted. The backward kernels are tested by Triton's interpreter and compiled for GPUs; they have not been
timed on one yet.

Torch's operations compute the rest: decays, kernels in closed form, the delta rule, float64, padding within a document,
and several documents in a row with a linear part. Gradients of gradients are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.configs.spans import Span, TerracedSpan
from linearize.ops import triton_launch
from linearize.ops.backend import Backend
from linearize.ops.inputs import LinearInputs, LinearState, Quotient, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.ops.partial import LOG2_E, Partial, accumulation_dtype
from linearize.ops.step import StepInputs, StepOutputs
from linearize.ops.triton_autograd import (
    HedgehogFeatures,
    KeysRead,
    LinearRead,
    LinearScan,
    Softmax,
    linear_states,
    linear_sums,
    summed_states,
)
from linearize.ops.triton_launch import CHUNK, OPTIONS, WIDEST, between_rows, power_of_2, rows_of_numbers, strides

MOST_GROUPED = 64  # the most query heads of one program of a step


class TritonBackend(Backend):
    """Kernels for the inputs that they support, torch's operations for all others."""

    splits_prompts = False  # few launches are faster than more

    def masks_whole_rows(self, q: Tensor) -> bool:
        """Return False: the kernels skip blocks of keys that no query of a block reads."""
        return False

    def softmax(self, x: SoftmaxInputs) -> Partial:
        """Compute softmax of every query over its window and its block's KV cache with eviction."""
        return _softmax(x) if _serves_softmax(x) else super().softmax(x)

    def window_softmax(self, x: SoftmaxInputs) -> Partial:
        """Compute softmax over the window (`reference.window_softmax`)."""
        x = replace(x, cached=None)
        return _softmax(x) if _serves_softmax(x) else super().window_softmax(x)

    def linear_scan(self, x: LinearInputs) -> Partial:
        """Compute the linear part (`reference.linear_scan`)."""
        if not _serves_linear(x):
            return super().linear_scan(x)
        phi_q, phi_k, v = (rows_of_numbers(tensor) for tensor in (x.queries(), x.phi_k, x.v))
        state = (None, None) if x.state is None else (x.state.S, x.state.z)
        return _unscaled(*LinearScan.apply(phi_q, phi_k, v, *state, LinearRead.of(x, None)))

    def scan_with_state(self, x: LinearInputs) -> tuple[Partial, LinearState]:
        """Return the `linear_scan`, and the state after the last token."""
        if wants_gradients(_tensors(x)) or not (_serves_linear(x) and _end_together(x.layout)):
            return self.linear_scan(x), linear_state(x)
        layout, span = x.layout, x.span
        phi_q, phi_k, v = (rows_of_numbers(tensor) for tensor in (x.queries(), x.phi_k, x.v))
        read = LinearRead.of(x, layout.once(("ends", span), lambda: _ends(span, layout)))
        carried = None if x.state is None else (x.state.S, x.state.z)
        S, z = summed_states(linear_states(phi_k, v, phi_q.shape[2], read), carried)
        linear = _unscaled(*linear_sums(phi_q, phi_k, v, (S, z), read))
        count = read.ends.shape[1]
        last = [y[:, :, i].clone() for i in range(-count, 0) for y in (S, z)]  # clones free the other states
        return linear, LinearState(*last)

    def output(
        self,
        window: Partial | None,
        linear: Partial | None,
        quotient: Callable[[], Quotient | None],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B H T D"] | None:
        """Return the output in `dtype`, or None if a kernel cannot compute it.

        In memory the heads of a token are adjacent, as the output projection reads them.
        """
        parts, one = [part for part in (window, linear) if part is not None], quotient()
        if one is None:
            return None
        tensors = *(x for part in parts for x in (part.num, part.den)), *(() if one.factor is None else (one.factor,))
        if wants_gradients(tensors) or any(x.dtype == torch.float64 for x in tensors):
            return None
        from linearize.ops import triton_outputs

        sums = [[x.contiguous() for x in (part.num, part.den)] for part in parts]
        (num_w, den_w), (num_l, den_l) = sums[0], sums[-1]
        (batch, heads, length, width), rows = num_w.shape, min(32, power_of_2(num_w.shape[2]))
        y = num_w.new_empty(batch, length, heads, width, dtype=dtype)
        factor = num_w if one.factor is None else one.factor
        triton_launch.launch(
            triton_outputs.quotient, (batch * heads, -(-length // rows)),
            *(num_w, den_w, num_l, den_l, factor, y, heads, length, one.least),
            WINDOW=window is not None, LINEAR=linear is not None, D=width, BLOCK_D=power_of_2(width), M=rows,
        )  # fmt: skip
        return y.transpose(1, 2)

    def step(self, x: StepInputs) -> StepOutputs:
        """Return the output of one more token, the slots after it, and the linear state, by one launch if possible."""
        quotient = x.quotient()
        return _one_token(x, quotient) if quotient is not None and _serves_step(x) else super().step(x)


def hedgehog(
    x: Float[Tensor, "B h T D"],
    weight: Float[Tensor, "M D N"],
    bias: Float[Tensor, "M N"] | None,
    activation: str,
    least: float,
) -> Float[Tensor, "B H T F"] | None:
    """Return Hedgehog's map of x, or None if no kernel can compute it.

    The map concatenates y = x W + b and -y, F = 2 N. `exp`: unchanged. `softmax_halves`: softmax over each half.
    `softmax`: softmax over both together. Softmax is no less than `least`.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if max(weight.shape[1:]) > WIDEST or any(tensor.dtype == torch.float64 for tensor in tensors):
        return None
    bias = None if bias is None else bias.contiguous()
    return HedgehogFeatures.apply(rows_of_numbers(x), weight.contiguous(), bias, activation, least)


def _softmax(x: SoftmaxInputs) -> Partial:
    """Compute softmax over window and cache by kernels."""
    pairs = (x.k, x.v) if x.cached is None else (x.k, x.v, x.cached.keys, x.cached.values)
    q, k, v, *pool = (rows_of_numbers(tensor.to(x.q.dtype)) for tensor in (x.q, *pairs))
    pool_k, pool_v = pool or (None, None)
    return Partial(*Softmax.apply(q, k, v, pool_k, pool_v, KeysRead.of(x)))


def _serves_softmax(x: SoftmaxInputs) -> bool:
    """Return whether kernels can compute softmax over window and cache."""
    tensors = (x.q, x.k, x.v) if x.cached is None else (x.q, x.k, x.v, x.cached.keys, x.cached.values)
    # Kernels sum the gradients of a cache's pairs in no fixed order.
    if x.cached is not None and torch.are_deterministic_algorithms_enabled() and wants_gradients(tensors):
        return False
    return bool(x.span.max_softmax_keys) and x.v.shape[3] <= WIDEST and not needs_fallback(tensors, x.layout)


def _serves_step(x: StepInputs) -> bool:
    """Return whether the kernel can compute the step: small sizes, no gradients, no decays, no delta rule."""
    if torch.is_grad_enabled() or x.q.dtype == torch.float64:
        return False
    widest, units, linear = x.q.shape[3], x.new_k.shape[1], x.linear
    if linear is not None:
        others = linear.beta, linear.log_decay_k, linear.log_decay_v, linear.skipped_k, linear.skipped_v, linear.kernel
        if any(other is not None for other in others):
            return False
        widest, units = max(linear.state.S.shape[2:]), linear.state.S.shape[1]
    return widest <= WIDEST and x.q.shape[1] <= MOST_GROUPED * units


def _one_token(x: StepInputs, quotient: Quotient) -> StepOutputs:
    """Compute one token by one kernel: softmax over the slots and a cache's, and the linear part."""
    from linearize.ops import triton_outputs

    at, linear = x.at, x.linear
    tensors = (x.q, x.new_k, x.new_v, x.k, x.v)
    q, new_k, new_v, k, v = (rows_of_numbers(tensor.to(x.q.dtype)) for tensor in tensors)
    (batch, heads, _, width), units, slots, features = q.shape, k.shape[1], k.shape[2], 16
    bias = at.bias(slots - at.slots, accumulation_dtype(v.dtype)) if at.slots else None
    unread: Tensor = q  # placeholder for arguments that the kernel does not read
    phi_q = phi_k = entering = enters = begins = unread
    before, after, state = [unread] * 4, [unread] * 4, None
    if linear is not None:
        phi_q, enters, state = linear.phi_q.contiguous(), at.enters.contiguous(), linear.state
        found = [tensor.contiguous() for tensor in state.named_tensors().values()]
        (units, features), before[: len(found)] = found[1].shape[1:], found
        if state.next_S is not None:
            assert at.flushes is not None
            begins = at.flushes
        if linear.phi_k is not None:
            entering = at.entering_slot if at.linear_delay else unread
            phi_k, made = rows_of_numbers(linear.phi_k), [torch.empty_like(tensor) for tensor in found]
            after[: len(made)], state = made, LinearState(*made)
    y = q.new_empty(q.shape)
    next_k, next_v = (tensor.new_empty(tensor.shape) if slots else tensor for tensor in (k, v))
    side, group = min(64, power_of_2(width)), heads // units
    triton_launch.launch(
        triton_outputs.one_token, (batch * units, -(-width // side)),
        *(q, new_k, new_v, k, v, at.slot if slots else unread, unread if bias is None else bias),
        *(phi_q, phi_k, entering, enters, *before, begins, unread if quotient.factor is None else quotient.factor),
        *(y, next_k, next_v, *after),
        *(*q.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *strides(k), *strides(v), *phi_k.stride()[:2]),
        *(0 if bias is None else between_rows(bias), units, group, units // k.shape[1], slots),
        *(x.scaling * LOG2_E, 1.0 if x.softcap is None else x.softcap, quotient.least),
        WINDOW=slots > 0, HIDES=bias is not None, LINEAR=linear is not None, WRITES=phi_k is not unread,
        LEAVES=entering is not unread, AHEAD=begins is not unread, SOFTCAP=x.softcap is not None, D=width,
        BLOCK_D=power_of_2(width), SIDE=side, F=features, BLOCK_F=power_of_2(features), M=power_of_2(group), N=32,
        **OPTIONS,
    )  # fmt: skip
    return StepOutputs(y, None, None, next_k, next_v, state)


def _tensors(x: LinearInputs) -> tuple[Tensor, ...]:
    """Return the inputs for which the linear part has gradients."""
    state = () if x.state is None else (x.state.S, x.state.z)
    return (x.queries(), x.phi_k, x.v, *state)


def _serves_linear(x: LinearInputs) -> bool:
    """Return whether kernels can compute the linear part."""
    if any(y is not None for y in (x.log_decay_k, x.log_decay_v, x.kernel)):
        return False
    before, features, width = x.phi_k.shape[2] - x.queries().shape[2], x.phi_k.shape[3], x.v.shape[3]
    if max(features, width) > WIDEST or width == 0 or before > x.span.max_softmax_keys + CHUNK - 1:
        return False
    return not needs_fallback(_tensors(x), x.layout) and _one_document(x.layout, x.state is not None)


def _unscaled(num: Float[Tensor, "B H T D"], den: Float[Tensor, "B H T"]) -> Partial:
    """Return the sums as a `Partial` with log_scale 0."""
    return Partial(num, den, torch.zeros((), device=den.device).expand_as(den))


def wants_gradients(inputs: tuple[Tensor, ...]) -> bool:
    """Return whether gradients are enabled and any of these inputs requires one."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def needs_fallback(inputs: tuple[Tensor, ...], layout: SequenceLayout) -> bool:
    """Return whether kernels cannot be used: inputs of double precision, or padding within a document."""
    return any(x.dtype == torch.float64 for x in inputs) or layout.compaction is not None


def _one_document(layout: SequenceLayout, carried: bool) -> bool:
    """Return whether all tokens of each row are of one document; with a state, of the carried one."""
    if layout.uniform:
        return True

    def found() -> bool:
        document = torch.where(layout.key_position >= 0, layout.key_document, layout.last_document)
        alone = document == (torch.zeros_like(layout.last_document) if carried else layout.last_document)
        return bool(alone.all())

    return layout.once(("one document", carried), found)


def _end_together(layout: SequenceLayout) -> bool:
    """Return whether every row's last token is in its last slot."""
    last = layout.key_position[:, -1:]
    return layout.uniform or layout.once("end together", lambda: bool((last == layout.count[:, None] - 1).all()))


def _ends(span: Span, layout: SequenceLayout) -> Int[Tensor, "B n"]:
    """Return the positions below which keys are in the state after the last token and, for blocks, in the next state.

    See `linear_state.linear_state`.
    """
    last = layout.count - 1
    found = [span.lo(last), last - span.linear_delay + 1] if isinstance(span, TerracedSpan) else [span.lo(last)]
    return torch.stack(found, dim=1)
