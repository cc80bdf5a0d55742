"""Triton kernels of our own for NVIDIA GPUs: Hedgehog's maps, window, additive linear part, KV caches, one more token.

Forward alone. A GPU works on one operation of a short prompt for less time than it takes to launch it, and the chunked
forms make hundreds of them per layer. Where gradients are wanted, and what the kernels do not define (decays, kernels
in closed form, the delta rule, float64, padding within a document, more than one document in front of a linear part),
is served by torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.ops.backend import Backend
from linearize.ops.inputs import LinearInputs, LinearState, Quotient, SoftmaxInputs
from linearize.ops.layout import Layout, Span, TerracedSpan
from linearize.ops.linear_state import linear_state
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.recurrent import StepInputs, StepOutputs, pushed
from linearize.ops.window import LOG2_E

WIDEST = 128  # features, and values of a head
MOST_BYTES = 2**15  # of the queries of a program
MOST_GROUPED = 64  # query heads of one program
CHUNK = 64  # queries of a program
# Products of float32 are three of TF32, which come near to it. No loads ahead: then 99 KiB of shared memory are enough,
# which GPUs have since Ampere.
HOW = {"PRECISION": "tf32x3", "num_stages": 1}
PAIR = "keys", "values"


class TritonBackend(Backend):
    """Kernels, where they serve; torch's operations elsewhere."""

    splits_prompts = False  # few launches are faster than more

    def missing(self, device: torch.device) -> str | None:
        """Why the kernels cannot run on a device; None: they can."""
        if device.type != "cuda":
            return "its kernels are for CUDA devices"
        if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
            return "its kernels are for NVIDIA's GPUs since Ampere"
        return None if find_spec("triton") else "triton is not installed (pip install 'linearize[gpu]')"

    def hedgehog(
        self,
        x: Float[Tensor, "B h T D"],
        weight: Float[Tensor, "M D N"],
        bias: Float[Tensor, "M N"] | None,
        activation: str,
        least: float,
    ) -> Float[Tensor, "B H T F"] | None:
        """y = x W + b and -y side by side, F = 2 N: `exp` as they are, `softmax_halves` and `softmax` each one's or
        over both, no less than `least`.
        """
        if max(weight.shape[1:]) > WIDEST or wants_more((x, weight), None):
            return None
        from linearize.ops import triton_kernels

        x, weight, biased = rows_of_numbers(x), weight.contiguous(), bias is not None
        bias = weight if bias is None else bias.contiguous()
        (batch, _, length, width), outputs, heads = x.shape, weight.shape[2], max(x.shape[1], len(weight))
        phi, rows = x.new_empty(batch, heads, length, 2 * outputs, dtype=torch.float32), min(CHUNK, power_of_2(length))
        launch(
            triton_kernels.hedgehog, (batch * heads, -(-length // rows)),
            *(x, weight, bias, phi, *strides(x), heads, heads // x.shape[1], heads // len(weight), length, least),
            D=width, BLOCK_D=min(64, power_of_2(width)), N=outputs, BLOCK_N=power_of_2(outputs), M=rows,
            BIAS=biased, SOFTMAX=activation != "exp", HALVES=activation == "softmax_halves", **HOW,
        )  # fmt: skip
        return phi

    def window_softmax(self, x: SoftmaxInputs) -> Partial:
        """The softmax part (`reference.window_softmax`)."""
        span, layout = x.span, x.layout
        if wants_more((x.q, x.k, x.v), layout) or not span.max_lag or x.v.shape[3] > WIDEST:
            return super().window_softmax(x)
        from linearize.ops import triton_kernels

        q, k, v = (rows_of_numbers(tensor) for tensor in (x.q, x.k.to(x.q.dtype), x.v.to(x.q.dtype)))
        batch, heads, length, width = q.shape
        num = q.new_empty(q.shape, dtype=torch.float32)
        part = Partial(num, *(num.new_empty(q.shape[:3]) for _ in range(2)))
        lowest, queries = _lowest(span, layout), (layout.query_position, layout.query_document)
        keys = layout.key_position, layout.key_document
        launch(
            triton_kernels.window, (batch * heads, -(-length // CHUNK)),
            *(q, k, v, lowest, *queries, *keys, part.num, part.den, part.log_scale),
            *(*strides(q), *strides(k), *strides(v), *map(between_rows, (lowest, queries[0], keys[0]))),
            *(heads, heads // k.shape[1], length, k.shape[2], span.max_lag, span.sinks),
            *(x.scaling * LOG2_E, 1.0 if x.softcap is None else x.softcap),
            D=width, BLOCK_D=power_of_2(width), SOFTCAP=x.softcap is not None, SINKS=span.sinks > 0,
            CARRIED=layout.sink_slots > 0, M=CHUNK, N=32, **HOW,
        )  # fmt: skip
        return part

    def with_cached(self, x: SoftmaxInputs, window: Partial) -> Partial:
        """Softmax of every query over window and what its block's cache holds; overwrites `window`."""
        assert x.cached is not None
        keys, values, blocks, held = x.cached.keys, x.cached.values, x.cached.blocks, x.cached.held
        group, block = x.q.shape[1] // keys.shape[1], blocks.slots.shape[2]
        rows = power_of_2(group * block)
        if wants_more((x.q, keys, values), None) or rows * values.shape[3] * x.q.element_size() > MOST_BYTES:
            return super().with_cached(x, window)
        from linearize.ops import triton_kernels

        q, k, v = (rows_of_numbers(tensor) for tensor in (x.q, keys.to(x.q.dtype), values.to(x.q.dtype)))
        batch, length, width, size = len(q), *q.shape[2:], held.shape[3]
        before = x.layout.key_position.shape[1] - length
        at, held = torch.where(blocks.slots >= before, blocks.slots - before, -1), held.contiguous()
        part = Partial(*(tensor.contiguous() for tensor in (window.num, window.den, window.log_scale)))
        launch(
            triton_kernels.cached, (batch * k.shape[1], held.shape[2]),
            *(q, k, v, at, held, part.num, part.den, part.log_scale),
            *(*strides(q), *strides(k), *strides(v), between_rows(at)),
            *(k.shape[1], group, length, held.shape[2], block, size),
            *(x.scaling * LOG2_E, 1.0 if x.softcap is None else x.softcap),
            D=width, BLOCK_D=power_of_2(width), SOFTCAP=x.softcap is not None, M=rows, N=32, **HOW,
        )  # fmt: skip
        return part

    def linear_scan(self, x: LinearInputs) -> Partial:
        """The linear part (`reference.linear_scan`)."""
        found = _scan(x, ends=False)
        return super().linear_scan(x) if found is None else found[0]

    def scan_with_state(self, x: LinearInputs) -> tuple[Partial, LinearState]:
        """The `linear_scan`, and the state after the last token (`linear_state.linear_state`)."""
        found = _scan(x, ends=True)
        if found is None:
            return super().linear_scan(x), linear_state(x)
        linear, state = found
        return linear, linear_state(x) if state is None else state

    def output(
        self,
        window: Partial | None,
        linear: Partial | None,
        quotient: Callable[[], Quotient | None],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B H T D"] | None:
        """The output in `dtype`. It lies as it is read next: the heads of a token side by side."""
        parts, one = [part for part in (window, linear) if part is not None], quotient()
        if one is None or wants_more(tuple(x for part in parts for x in (part.num, part.den)), None):
            return None
        from linearize.ops import triton_outputs

        sums = [[x.contiguous() for x in (part.num, part.den)] for part in parts]
        (num_w, den_w), (num_l, den_l) = sums[0], sums[-1]
        (batch, heads, length, width), rows = num_w.shape, min(32, power_of_2(num_w.shape[2]))
        y = num_w.new_empty(batch, length, heads, width, dtype=dtype)
        factor = num_w if one.factor is None else one.factor
        launch(
            triton_outputs.quotient, (batch * heads, -(-length // rows)),
            *(num_w, den_w, num_l, den_l, factor, y, heads, length, one.least),
            WINDOW=window is not None, LINEAR=linear is not None, D=width, BLOCK_D=power_of_2(width), M=rows,
        )  # fmt: skip
        return y.transpose(1, 2)

    def step(self, x: StepInputs) -> StepOutputs:
        """The output of one more token, the slots behind it, and the linear state: in one launch."""
        quotient = x.quotient()
        return _one_token(x, quotient) if quotient is not None and _serves_step(x) else super().step(x)


def _serves_step(x: StepInputs) -> bool:
    """Return whether the kernel can compute the step: sizes, no gradients, nothing that decays or is erased."""
    if torch.is_grad_enabled() or x.q.dtype == torch.float64:
        return False
    widest, units, linear = x.q.shape[3], x.new["keys"].shape[1], x.linear
    if linear is not None:
        others = linear.beta, linear.log_decay_k, linear.log_decay_v, linear.skipped_k, linear.skipped_v, linear.kernel
        if any(other is not None for other in others):
            return False
        widest, units = max(linear.state.S.shape[2:]), linear.state.S.shape[1]
    return widest <= WIDEST and x.q.shape[1] <= MOST_GROUPED * units


def _one_token(x: StepInputs, quotient: Quotient) -> StepOutputs:
    """Softmax over the slots, the token itself, and what a cache holds, and the linear part below them.

    The first `span.sinks` slots are those of sinks that have left the others (`recurrent.pushed`).
    """
    from linearize.ops import triton_outputs

    span, at, linear = x.at.span, x.at, x.linear
    pairs = (*(x.new[name] for name in PAIR), *(x.slots[name] for name in PAIR))
    q, new_k, new_v, k, v = (rows_of_numbers(tensor.to(x.q.dtype)) for tensor in (x.q, *pairs))
    bias = at.bias(1, accumulation_dtype(x.new["values"].dtype)) if span.max_lag else None
    (batch, heads, _, width), units, features, window = q.shape, k.shape[1], 16, bias is not None
    unread: Tensor = q  # in the place of what there is none of
    held_k, held_v, held_position = k, v, unread
    if x.cached is not None:
        held_k, held_v = (rows_of_numbers(x.cached[name]) for name in PAIR)
        held_position = x.cached["position"]
    phi_q = phi_k = enters = begins = unread
    before, after, state, slot = [unread] * 4, [unread] * 4, None, 0
    if linear is not None:
        phi_q, enters, state = linear.phi_q.contiguous(), at.enters.contiguous(), linear.state
        found = [tensor.contiguous() for tensor in state.named_tensors().values()]
        (units, features), before[: len(found)] = found[1].shape[1:], found
        if state.next_S is not None:
            assert at.flushes is not None
            begins = at.flushes
        slot = k.shape[2] - span.fold_lag  # of the key that enters
        if linear.phi_k is not None:
            phi_k, made = rows_of_numbers(linear.phi_k), [torch.empty_like(tensor) for tensor in found]
            after[: len(made)], state = made, LinearState(*made)
    y = q.new_empty(q.shape)
    next_k, next_v = (tensor.new_empty(tensor.shape) if window else tensor for tensor in (k, v))
    side, group = min(64, power_of_2(width)), heads // units
    launch(
        triton_outputs.one_token, (batch * units, -(-width // side)),
        *(q, new_k, new_v, k, v, unread if bias is None else bias, at.position, held_k, held_v),
        held_position.contiguous(),
        *(phi_q, phi_k, enters, *before, begins, unread if quotient.factor is None else quotient.factor),
        *(y, next_k, next_v, *after),
        *(*q.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *strides(k), *strides(v)),
        *(*strides(held_k), *strides(held_v), *phi_k.stride()[:2]),
        0 if bias is None else between_rows(bias),
        *(units, group, units // k.shape[1], k.shape[2], span.sinks, slot, held_k.shape[2]),
        *(x.scaling * LOG2_E, 1.0 if x.softcap is None else x.softcap, quotient.least),
        WINDOW=window, CACHE=x.cached is not None, LINEAR=linear is not None, WRITES=phi_k is not unread,
        AHEAD=begins is not unread, SOFTCAP=x.softcap is not None, D=width, BLOCK_D=power_of_2(width), SIDE=side,
        F=features, BLOCK_F=power_of_2(features), M=power_of_2(group), N=32, **HOW,
    )  # fmt: skip
    others = {name: torch.cat([x.slots[name], new], dim=2) for name, new in x.new.items() if name not in PAIR}
    return StepOutputs(y, None, None, {"keys": next_k, "values": next_v} | pushed(others, at), state)


def _scan(x: LinearInputs, *, ends: bool) -> tuple[Partial, LinearState | None] | None:
    """The linear part, and where `ends` are asked for the state behind rows that end together; None: the kernels do
    not define it.
    """
    phi_q, phi_k, v, span, layout, state = x.queries(), x.phi_k, x.v, x.span, x.layout, x.state
    before = phi_k.shape[2] - phi_q.shape[2]
    decays = x.log_decay_k, x.log_decay_v
    other = any(y is not None for y in (*decays, x.kernel)) or max(phi_k.shape[3], v.shape[3]) > WIDEST
    other |= before > span.max_lag + CHUNK - 1 or v.shape[3] == 0
    if other or wants_more((phi_q, phi_k, v), layout) or not _one_document(layout, state is not None):
        return None
    from linearize.ops import triton_kernels

    phi_q, phi_k, v = (rows_of_numbers(tensor) for tensor in (phi_q, phi_k, v))
    (batch, heads, length, features), (key_heads, slots), width = phi_q.shape, phi_k.shape[1:3], v.shape[3]
    chunks, position = -(-length // CHUNK), layout.key_position
    until = layout.once(("ends", span), lambda: _ends(span, layout))
    states = chunks + (until.shape[1] if ends and _end_together(layout) else 0)
    S = phi_q.new_empty(batch, key_heads, states, features, width, dtype=torch.float32)
    z = phi_q.new_empty(batch, key_heads, states, features, dtype=torch.float32)
    side = min(64, power_of_2(width))
    blocks = {"F": features, "BLOCK_F": power_of_2(features), "D": width, "BLOCK_D": side, "C": CHUNK} | HOW
    num = phi_q.new_empty(batch, heads, length, width, dtype=torch.float32)
    den = num.new_empty(num.shape[:3])
    launch(
        triton_kernels.linear_states, (batch * key_heads, states, -(-width // side)),
        *(phi_k, v, position, until, S, z, *strides(phi_k), *strides(v), between_rows(position), between_rows(until)),
        *(key_heads, key_heads // v.shape[1], slots, before, chunks, states, span.max_lag, span.sinks),
        **blocks,
    )  # fmt: skip
    if state is not None:
        S[:, :, 0] += state.S
        z[:, :, 0] += state.z
    S, z, lowest = S.cumsum(2), z.cumsum(2), _lowest(span, layout)
    launch(
        triton_kernels.linear_outputs, (batch * heads, chunks, -(-width // side)),
        *(phi_q, phi_k, v, lowest, position, S, z, num, den),
        *(*strides(phi_q), *strides(phi_k), *strides(v), between_rows(lowest), between_rows(position)),
        *(heads, heads // key_heads, heads // v.shape[1], length, slots, states),
        *(span.max_lag, span.fold_lag, span.sinks),
        **(blocks if v.dtype == torch.float32 else blocks | {"PRECISION": "tf32"}),  # values are rounded more than that
    )  # fmt: skip
    scale = layout.once("no scale", lambda: torch.zeros((), device=v.device))
    behind = [y[:, :, i].clone() for i in range(chunks, states) for y in (S, z)]  # which do not hold on to all states
    return Partial(num, den, scale.expand_as(den)), LinearState(*behind) if behind else None


def launch(kernel: Any, grid: tuple[int, ...], *inputs: Any, **options: Any) -> None:
    """On the device of the inputs, whichever is the current one."""
    with torch.cuda.device_of(inputs[0]):
        kernel[grid](*inputs, **options)


def wants_more(inputs: tuple[Tensor, ...], layout: Layout | None) -> bool:
    """Gradients, numbers of double precision, or padding within a document."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    doubles = any(x.dtype == torch.float64 for x in inputs)
    return wanted or doubles or (layout is not None and layout.compaction is not None)


def _one_document(layout: Layout, carried: bool) -> bool:
    """Return whether all tokens of a row are of one document, the carried one where there is a state."""
    if layout.uniform:
        return True

    def found() -> bool:
        document = torch.where(layout.key_position >= 0, layout.key_document, layout.last_document)
        alone = document == (torch.zeros_like(layout.last_document) if carried else layout.last_document)
        return bool(alone.all())

    return layout.once(("one document", carried), found)


def _end_together(layout: Layout) -> bool:
    """Return whether every row's last token is in its last slot."""
    last = layout.key_position[:, -1:]
    return layout.uniform or layout.once("end together", lambda: bool((last == layout.count[:, None] - 1).all()))


def _lowest(span: Span, layout: Layout) -> Int[Tensor, "B T"]:
    """lo(n) of each query, -1 for padding."""
    position = layout.query_position
    return layout.once(("lowest", span), lambda: torch.where(position >= 0, span.lo(position), -1))


def _ends(span: Span, layout: Layout) -> Int[Tensor, "B n"]:
    """Below which positions keys are in the state after the last token, and in that of the next block if there is one
    (`linear_state.linear_state`).
    """
    last = layout.count - 1
    found = [span.lo(last), last - span.fold_lag + 1] if isinstance(span, TerracedSpan) else [span.lo(last)]
    return torch.stack(found, dim=1)


def rows_of_numbers(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Float[Tensor, "B h K X"]) -> tuple[int, ...]:
    return x.stride()[:3]


def between_rows(x: Tensor) -> int:
    return x.stride(0) if len(x) > 1 else 0


@functools.cache
def power_of_2(number: int) -> int:
    """The least one that is no less, and no less than 16, which products take at least."""
    return max(16, 1 << (number - 1).bit_length())
