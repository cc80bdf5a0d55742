"""Prompts in few launches, by Triton kernels of our own: Hedgehog's maps, window, additive linear part, KV caches.

Forward alone. A GPU works on one operation of a short prompt for less time than it takes to launch it, and the chunked
forms make hundreds of them per layer. Where gradients are wanted, and what the kernels do not define (decays, kernels
in closed form, the delta rule, float64, padding within a document, more than one document in
front of a linear part), is served by the dense and chunked forms.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.ops import chunked, dense, eviction_cache
from linearize.ops.delta import delta_values
from linearize.ops.eviction_cache import Blocks
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout, Span, TerracedSpan
from linearize.ops.linear_state import LinearState, linear_state
from linearize.ops.partial import Partial
from linearize.ops.window import LOG2_E

__all__ = ["delta_values", "hedgehog", "linear_scan", "missing", "serves_hedgehog"]
__all__ += ["scan_with_state", "window_softmax", "with_cached"]

WIDEST = 128  # features, and values of a head
MOST_BYTES = 2**15  # of the queries of a program
CHUNK = 64  # queries of a program
# Products of float32 are three of TF32, which come near to it. No loads ahead: then 99 KiB of shared memory are enough,
# which GPUs have since Ampere.
HOW = {"PRECISION": "tf32x3", "num_stages": 1}


def missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None: they can."""
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
        return "its kernels are for NVIDIA's GPUs since Ampere"
    return None if find_spec("triton") else "triton is not installed (pip install 'linearize[gpu]')"


def serves_hedgehog(x: Float[Tensor, "B h T D"], weight: Float[Tensor, "M D N"]) -> bool:
    """Whether `hedgehog` is for these inputs: no gradient is wanted."""
    return max(weight.shape[1:]) <= WIDEST and not wants_more((x, weight), None)


def hedgehog(
    x: Float[Tensor, "B h T D"],
    weight: Float[Tensor, "M D N"],
    bias: Float[Tensor, "M N"] | None,
    activation: str,
    least: float,
) -> Float[Tensor, "B H T F"]:
    """y = x W + b and -y side by side, F = 2 N: `exp` as they are, `softmax_halves` and `softmax` each one's or over
    both, no less than `least`.
    """
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


def window_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    scaling: float,
    softcap: float | None = None,
    layout: Layout,
) -> Partial:
    """The softmax part (`reference.window_softmax`)."""
    if wants_more((q, k, v), layout) or not span.max_lag or v.shape[3] > WIDEST:
        options = {"span": span, "scaling": scaling, "softcap": softcap, "layout": layout}
        return _others(q, k).window_softmax(q, k, v, **options)
    from linearize.ops import triton_kernels

    q, k, v = (rows_of_numbers(x) for x in (q, k.to(q.dtype), v.to(q.dtype)))
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
        *(scaling * LOG2_E, 1.0 if softcap is None else softcap),
        D=width, BLOCK_D=power_of_2(width), SOFTCAP=softcap is not None, SINKS=span.sinks > 0,
        CARRIED=layout.sink_slots > 0, M=CHUNK, N=32, **HOW,
    )  # fmt: skip
    return part


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """The linear part (`reference.linear_scan`)."""
    given: dict[str, Any] = {"log_decay_k": log_decay_k, "log_decay_v": log_decay_v, "kernel": kernel, "state": state}
    given |= {"span": span, "layout": layout}
    found = _scan(phi_q, phi_k, v, ends=False, **given)
    return _others(phi_q, phi_k).linear_scan(phi_q, phi_k, v, **given) if found is None else found[0]


def scan_with_state(
    phi_q: Float[Tensor, "B H T F"], phi_k: Float[Tensor, "B Hk K F"], v: Float[Tensor, "B G K D"], **given: Any
) -> tuple[Partial, LinearState]:
    """The `linear_scan`, and the state after the last token (`linear_state.linear_state`)."""
    found = _scan(phi_q, phi_k, v, ends=True, **given)
    if found is None:
        return _others(phi_q, phi_k).linear_scan(phi_q, phi_k, v, **given), linear_state(phi_k, v, **given)
    linear, state = found
    return linear, linear_state(phi_k, v, **given) if state is None else state


def _scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
    ends: bool,
) -> tuple[Partial, LinearState | None] | None:
    """The linear part, and where `ends` are asked for the state behind rows that end together; None: the kernels do
    not define it.
    """
    before = phi_k.shape[2] - phi_q.shape[2]
    other = any(x is not None for x in (log_decay_k, log_decay_v, kernel)) or max(phi_k.shape[3], v.shape[3]) > WIDEST
    other |= before > span.max_lag + CHUNK - 1 or v.shape[3] == 0
    if other or wants_more((phi_q, phi_k, v), layout) or not _one_document(layout, state is not None):
        return None
    from linearize.ops import triton_kernels

    phi_q, phi_k, v = (rows_of_numbers(x) for x in (phi_q, phi_k, v))
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
    behind = [x[:, :, i].clone() for i in range(chunks, states) for x in (S, z)]  # which do not hold on to all states
    return Partial(num, den, scale.expand_as(den)), LinearState(*behind) if behind else None


def with_cached(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G P D"],
    v: Float[Tensor, "B G P D"],
    blocks: Blocks,
    held: Int[Tensor, "B G J C"],
    window: Partial,
    *,
    scaling: float,
    softcap: float | None,
    layout: Layout,
) -> Partial:
    """Softmax of every query over window and what its block's cache holds (`eviction_cache.with_cached`).

    Overwrites `window`.
    """
    group, block = q.shape[1] // k.shape[1], blocks.slots.shape[2]
    rows = power_of_2(group * block)
    if wants_more((q, k, v), None) or rows * v.shape[3] * q.element_size() > MOST_BYTES:
        options = {"scaling": scaling, "softcap": softcap, "layout": layout}
        return eviction_cache.with_cached(q, k, v, blocks, held, window, **options)
    from linearize.ops import triton_kernels

    q, k, v = (rows_of_numbers(x) for x in (q, k.to(q.dtype), v.to(q.dtype)))
    batch, length, width, size = len(q), *q.shape[2:], held.shape[3]
    before = layout.key_position.shape[1] - length
    at, held = torch.where(blocks.slots >= before, blocks.slots - before, -1), held.contiguous()
    part = Partial(*(x.contiguous() for x in (window.num, window.den, window.log_scale)))
    launch(
        triton_kernels.cached, (batch * k.shape[1], held.shape[2]),
        *(q, k, v, at, held, part.num, part.den, part.log_scale),
        *(*strides(q), *strides(k), *strides(v), between_rows(at)),
        *(k.shape[1], group, length, held.shape[2], block, size),
        *(scaling * LOG2_E, 1.0 if softcap is None else softcap),
        D=width, BLOCK_D=power_of_2(width), SOFTCAP=softcap is not None, M=rows, N=32, **HOW,
    )  # fmt: skip
    return part


def launch(kernel: Any, grid: tuple[int, ...], *inputs: Any, **options: Any) -> None:
    """On the device of the inputs, whichever is the current one."""
    with torch.cuda.device_of(inputs[0]):
        kernel[grid](*inputs, **options)


def wants_more(inputs: tuple[Tensor, ...], layout: Layout | None) -> bool:
    """Gradients, numbers of double precision, or padding within a document."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    doubles = any(x.dtype == torch.float64 for x in inputs)
    return wanted or doubles or (layout is not None and layout.compaction is not None)


def _others(queries: Tensor, keys: Tensor) -> ModuleType:
    return dense if dense.pays(queries.shape, keys.shape[2]) else chunked


def _one_document(layout: Layout, carried: bool) -> bool:
    """Whether all tokens of a row are of one document, the carried one where there is a state."""
    if layout.uniform:
        return True

    def found() -> bool:
        document = torch.where(layout.key_position >= 0, layout.key_document, layout.last_document)
        alone = document == (torch.zeros_like(layout.last_document) if carried else layout.last_document)
        return bool(alone.all())

    return layout.once(("one document", carried), found)


def _end_together(layout: Layout) -> bool:
    """Whether every row's last token is in its last slot."""
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
