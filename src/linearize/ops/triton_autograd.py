"""Autograd functions of Triton kernels: softmax over window and cache, the linear part, and Hedgehog's maps.

Backward passes recompute scores, so that memory is linear in inputs and outputs. They are not differentiable. The
gradients of a cache's pairs are summed in no fixed order: two runs can differ in their last digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.configs.spans import Span
from linearize.ops import triton_launch
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import LOG2_E
from linearize.ops.triton_launch import CHUNK, MOST_BYTES, OPTIONS, between_rows, power_of_2, strides

QUERIES = 32  # queries of a program of a backward pass
KEYS = 32
WIDE_ROW = 256  # bytes of a head's query above which only half as many queries fit the shared memory


def lowest_keys(span: Span, layout: SequenceLayout) -> Int[Tensor, "B T"]:
    """Return lo(n) of each query, -1 for padding."""
    position = layout.query_position
    return layout.once(("lowest", span), lambda: torch.where(position >= 0, span.lo(position), -1))


class KeysRead(NamedTuple):
    """The keys that each query reads, in the form that kernels take.

    Attributes:
        tensors: `lowest_keys`, positions and documents of queries, positions and documents of keys.
        lag: the most window slots that a query reads, its own among them.
        carried: whether the first slots hold the sinks of a carried document.
        slots_of_blocks: [B or 1, J, w], the query in each place of a block, -1 for none; None: there is no cache.
        held: [B, G, J, C], places in the pool, -1 for none.
    """

    tensors: tuple[Tensor, ...]
    lag: int
    sinks: int
    carried: bool
    scaling: float
    softcap: float | None
    slots_of_blocks: Tensor | None
    held: Tensor | None

    @classmethod
    def of(cls, x: SoftmaxInputs) -> KeysRead:
        """Return the keys that the queries of `x` read."""
        span, layout, cached = x.span, x.layout, x.cached
        queries, keys = (layout.query_position, layout.query_document), (layout.key_position, layout.key_document)
        slots_of_blocks = held = None
        if cached is not None:
            before = layout.key_position.shape[1] - layout.length
            slots = cached.blocks.slots
            slots_of_blocks = torch.where(slots >= before, slots - before, -1)
            held = cached.held.contiguous()
        tensors = lowest_keys(span, layout), *queries, *keys
        sizes = span.max_softmax_keys, span.sinks, layout.sink_slots > 0, x.scaling, x.softcap
        return cls(tensors, *sizes, slots_of_blocks, held)

    def window_strides(self) -> tuple[int, ...]:
        """Return the strides of rows of `lowest_keys`, queries and keys."""
        lowest, queries, _, keys, _ = self.tensors
        return between_rows(lowest), between_rows(queries), between_rows(keys)

    def factors(self) -> tuple[float, float]:
        """Return the factor from products to scores to base 2, and the softcap (1 for none)."""
        return self.scaling * LOG2_E, 1.0 if self.softcap is None else self.softcap

    def grid_of_blocks(self, q: Tensor, k: Tensor, most: int) -> tuple[tuple[int, int, int], int]:
        """Return the grid of programs that read the cache, and the number of queries of each, no more than `most`."""
        assert self.slots_of_blocks is not None
        (batch, units), (count, width) = k.shape[:2], self.slots_of_blocks.shape[1:]
        queries = q.shape[1] // units * width
        rows = min(power_of_2(queries), most)
        return (batch * units, count, -(-queries // rows)), rows


class Softmax(torch.autograd.Function):
    """Compute num, den and log_scale of softmax over the window and, if there is a cache, over its pool of pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K D"],
        pool_k: Float[Tensor, "B G P D"] | None,
        pool_v: Float[Tensor, "B G P D"] | None,
        read: KeysRead,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from linearize.ops import triton_kernels

        differentiable = any(ctx.needs_input_grad)
        batch, heads, length, width = q.shape
        num = q.new_empty(q.shape, dtype=torch.float32)
        den, log_scale = num.new_empty(q.shape[:3]), num.new_empty(q.shape[:3])
        # The place of the key with the largest score, whose gradient includes that of the running max.
        place = torch.empty_like(den, dtype=torch.int32) if differentiable else den
        common = {"D": width, "BLOCK_D": power_of_2(width), "SOFTCAP": read.softcap is not None, "N": 32} | OPTIONS
        common["PLACE"] = differentiable
        triton_launch.launch(
            triton_kernels.window, (batch * heads, -(-length // CHUNK)),
            *(q, k, v, *read.tensors, num, den, log_scale, place),
            *(*strides(q), *strides(k), *strides(v), *read.window_strides()),
            *(heads, heads // k.shape[1], length, k.shape[2], read.lag, read.sinks, *read.factors()),
            SINKS=read.sinks > 0, CARRIED=read.carried, M=CHUNK, **common,
        )  # fmt: skip
        if read.held is not None and read.slots_of_blocks is not None:
            assert pool_k is not None and pool_v is not None
            programs, rows = read.grid_of_blocks(q, pool_k, MOST_BYTES // (power_of_2(width) * q.element_size()))
            units, (count, block) = pool_k.shape[1], read.slots_of_blocks.shape[1:]
            triton_launch.launch(
                triton_kernels.cached, programs,
                *(q, pool_k, pool_v, read.slots_of_blocks, read.held, num, den, log_scale, place),
                *(*strides(q), *strides(pool_k), *strides(pool_v), between_rows(read.slots_of_blocks)),
                *(units, heads // units, length, k.shape[2], count, block, read.held.shape[3], *read.factors()),
                M=rows, **common,
            )  # fmt: skip
        if differentiable:
            ctx.save_for_backward(q, k, v, pool_k, pool_v, num, den, log_scale, place)
            ctx.read = read
        return num, den, log_scale

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        from linearize.ops import triton_gradients

        q, k, v, pool_k, pool_v, num, den, log_scale, place = ctx.saved_tensors
        read: KeysRead = ctx.read
        g_num, g_den, g_log_scale = (g.contiguous() for g in grad_outputs)
        batch, heads, length, width = q.shape
        units, slots, sinks = k.shape[1], k.shape[2], read.sinks
        common = {"D": width, "BLOCK_D": power_of_2(width), "SOFTCAP": read.softcap is not None} | OPTIONS
        if q.dtype != torch.float32:
            common["PRECISION"] = "tf32"  # represents 16-bit inputs exactly
        rows = queries_at_once(power_of_2(width) * q.element_size())
        grad_q, delta, chunks = torch.empty_like(num), torch.empty_like(den), -(-length // rows)
        # The gradients that each chunk of queries adds to the sinks before its window's slots.
        sink_k, sink_v = (num.new_empty(batch, heads, chunks, sinks, width) for _ in range(2))
        sink_slot = place.new_empty(batch, chunks, sinks, dtype=torch.int64)
        window = (*strides(q), *strides(k), *strides(v), *read.window_strides())
        triton_launch.launch(
            triton_gradients.window_queries, (batch * heads, chunks),
            *(q, k, v, *read.tensors, num, den, log_scale, place, g_num, g_den, g_log_scale),
            *(delta, grad_q, sink_k, sink_v, sink_slot, *window),
            *(heads, heads // units, length, slots, read.lag, sinks, *read.factors()),
            SINKS=sinks > 0, CARRIED=read.carried, M=rows, N=KEYS, **common,
        )  # fmt: skip
        grad_k, grad_v = (num.new_empty(batch, units, slots, width) for _ in range(2))
        if any(ctx.needs_input_grad[1:3]):
            triton_launch.launch(
                triton_gradients.window_keys, (batch * units, -(-slots // KEYS)),
                *(q, k, v, *read.tensors, log_scale, place, g_num, g_den, delta, grad_k, grad_v, *window),
                *(units, heads // units, length, slots, read.lag, sinks, *read.factors()),
                SINKS=sinks > 0, CHUNK=rows, M=rows, N=KEYS, **common,
            )  # fmt: skip
            if sinks:
                _add_sinks(grad_k, sink_k, sink_slot)
                _add_sinks(grad_v, sink_v, sink_slot)
        grad_pool_k = grad_pool_v = None
        if read.held is not None and read.slots_of_blocks is not None:
            programs, rows = read.grid_of_blocks(q, pool_k, rows)
            units, pool, (count, block) = pool_k.shape[1], pool_k.shape[2], read.slots_of_blocks.shape[1:]
            grad_pool_k, grad_pool_v = (num.new_zeros(batch, units, pool, width) for _ in range(2))
            triton_launch.launch(
                triton_gradients.cached_pairs, programs,
                *(q, pool_k, pool_v, read.slots_of_blocks, read.held, log_scale, place, g_num, g_den, delta),
                *(grad_q, grad_pool_k, grad_pool_v),
                *(*strides(q), *strides(pool_k), *strides(pool_v), between_rows(read.slots_of_blocks)),
                *(units, heads // units, length, slots, count, block, read.held.shape[3], pool, *read.factors()),
                M=rows, N=KEYS, **common,
            )  # fmt: skip
        grads = grad_q, grad_k, grad_v, grad_pool_k, grad_pool_v
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return *(g.to(q.dtype) if g is not None and needed else None for g, needed in wanted), None


def queries_at_once(row_bytes: int) -> int:
    """Return how many queries of `row_bytes` bytes each a program of the backward pass has."""
    return QUERIES if row_bytes <= WIDE_ROW else QUERIES // 2


def warps_for(features: int) -> int:
    """Return the warps of a program of the linear part's backward pass; wide rows need more for their registers."""
    return 4 if features <= 64 else 8


def _add_sinks(grad: Float[Tensor, "B G K D"], added: Float[Tensor, "B H N s D"], slot: Int[Tensor, "B N s"]) -> None:
    """Add the gradients `added` by chunks of queries to the sinks in these slots (-1: none), in a fixed order."""
    batch, units = grad.shape[:2]
    added = added.unflatten(1, (units, -1)).sum(2)  # 0 where there is no sink
    row = torch.arange(batch, device=grad.device)[:, None, None, None]
    unit = torch.arange(units, device=grad.device)[:, None, None]
    grad.index_put_((row, unit, slot.clamp_min(0)[:, None]), added, accumulate=True)


class LinearRead(NamedTuple):
    """The keys that each query reads through the linear part, in the form that kernels take.

    Attributes:
        lowest: of each query (`lowest_keys`).
        position: of keys.
        ends: [B or 1, n], positions below which keys are in each state after all queries; n = 0: no state is wanted.
        lag: the most window slots of a query.
        late: the delay of linear keys (`span.linear_delay`).
    """

    lowest: Tensor
    position: Tensor
    query_position: Tensor
    ends: Tensor
    lag: int
    late: int
    sinks: int

    @classmethod
    def of(cls, x: LinearInputs, ends: Tensor | None) -> LinearRead:
        """Return the keys that the queries of `x` read."""
        span, layout = x.span, x.layout
        ends = layout.query_position[:, :0] if ends is None else ends
        positions = layout.key_position, layout.query_position
        return cls(lowest_keys(span, layout), *positions, ends, span.max_softmax_keys, span.linear_delay, span.sinks)


def linear_states(
    phi_k: Float[Tensor, "B Hk K F"], v: Float[Tensor, "B G K D"], length: int, read: LinearRead
) -> tuple[Float[Tensor, "B Hk N F D"], Float[Tensor, "B Hk N F"]]:
    """Return the sums added to S and z before each chunk of queries, and then by the keys up to each of the ends."""
    before, chunks = phi_k.shape[2] - length, -(-length // CHUNK)
    number = chunks + read.ends.shape[1]
    return _added_states(phi_k, v, None, read.position, read.ends, before, chunks, number, read.lag, read.sinks)


def _added_states(
    phi: Tensor,
    v: Tensor,
    weight: Tensor | None,
    position: Tensor,
    ends: Tensor,
    before: int,
    chunks: int,
    number: int,
    lag: int,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    from linearize.ops import triton_kernels

    (batch, heads, slots, features), width = phi.shape, v.shape[3]
    S = phi.new_empty(batch, heads, number, features, width, dtype=torch.float32)
    z, blocks = S.new_empty(S.shape[:4]), linear_blocks(features, width)
    triton_launch.launch(
        triton_kernels.linear_states, (batch * heads, number, -(-width // blocks["BLOCK_D"])),
        *(phi, v, z if weight is None else weight, position, ends, S, z),
        *(*strides(phi), *strides(v), between_rows(position), between_rows(ends)),
        *(heads, heads // v.shape[1], slots, before, chunks, number, lag, sinks),
        WEIGHTED=weight is not None, **blocks,
    )  # fmt: skip
    return S, z


def linear_blocks(features: int, width: int) -> dict[str, Any]:
    """Return the sizes and options that the kernels of the linear part share."""
    side = min(64, power_of_2(width))
    return {"F": features, "BLOCK_F": power_of_2(features), "D": width, "BLOCK_D": side, "C": CHUNK} | OPTIONS


def linear_sums(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    states: tuple[Tensor, Tensor],
    read: LinearRead,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Return num and den of every query, from S and z before each chunk of queries."""
    from linearize.ops import triton_kernels

    (batch, heads, length, features), (key_heads, slots), width = phi_q.shape, phi_k.shape[1:3], v.shape[3]
    num = phi_q.new_empty(batch, heads, length, width, dtype=torch.float32)
    den, blocks = num.new_empty(num.shape[:3]), linear_blocks(features, width)
    if v.dtype != torch.float32:
        blocks["PRECISION"] = "tf32"  # 16-bit values are rounded more than that
    triton_launch.launch(
        triton_kernels.linear_outputs, (batch * heads, -(-length // CHUNK), -(-width // blocks["BLOCK_D"])),
        *(phi_q, phi_k, v, read.lowest, read.position, *states, num, den),
        *(*strides(phi_q), *strides(phi_k), *strides(v), between_rows(read.lowest), between_rows(read.position)),
        *(heads, heads // key_heads, heads // v.shape[1], length, slots, states[0].shape[2]),
        *(read.lag, read.late, read.sinks),
        **blocks,
    )  # fmt: skip
    return num, den


def summed_states(added: tuple[Tensor, Tensor], carried: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the cumulative S and z from the sums added to each (in place), starting from the carried ones."""
    if carried is not None:
        for x, first in zip(added, carried, strict=True):
            x[:, :, 0] += first
    return added[0].cumsum(2), added[1].cumsum(2)


class LinearScan(torch.autograd.Function):
    """Compute num and den of the linear part, from the carried state S, z unless it is None."""

    @staticmethod
    def forward(
        ctx: Any,
        phi_q: Float[Tensor, "B H T F"],
        phi_k: Float[Tensor, "B Hk K F"],
        v: Float[Tensor, "B G K D"],
        S: Float[Tensor, "B Hk F D"] | None,
        z: Float[Tensor, "B Hk F"] | None,
        read: LinearRead,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(phi_q, phi_k, v, S, z)
        ctx.read = read
        carried = None if S is None or z is None else (S, z)
        states = summed_states(linear_states(phi_k, v, phi_q.shape[2], read), carried)
        return linear_sums(phi_q, phi_k, v, states, read)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        from linearize.ops import triton_gradients

        phi_q, phi_k, v, first_S, first_z = ctx.saved_tensors
        read: LinearRead = ctx.read
        g_num, g_den = (g.contiguous() for g in grad_outputs)
        (batch, heads, length, features), (units, slots), width = phi_q.shape, phi_k.shape[1:3], v.shape[3]
        wants_q, wants_k, wants_v, *wants_state = ctx.needs_input_grad[:5]
        chunks = -(-length // CHUNK)
        rows = between_rows(read.lowest), between_rows(read.position)
        sizes = length, slots, chunks, read.lag, read.late, read.sinks
        blocks = linear_blocks(features, width) | {"M": QUERIES, "N": KEYS, "num_warps": warps_for(features)}
        grad_q = grad_k = grad_v = grad_S = grad_z = None
        if wants_q:
            carried = None if first_S is None else (first_S, first_z)
            S, z = summed_states(linear_states(phi_k, v, length, read), carried)
            grad_q = torch.empty(phi_q.shape, dtype=torch.float32, device=phi_q.device)
            triton_launch.launch(
                triton_gradients.linear_queries, (batch * heads, -(-length // QUERIES)),
                *(phi_k, v, read.lowest, read.position, S, z, g_num, g_den, grad_q),
                *(*strides(phi_k), *strides(v), *rows, heads, heads // units, heads // v.shape[1], *sizes),
                **blocks,
            )  # fmt: skip
        if wants_k or wants_v or any(wants_state):
            # The gradients of the states: each chunk's own, then the sums over it and all later chunks.
            position = read.query_position
            added = _added_states(phi_q, g_num, g_den, position, position, 0, chunks + 1, chunks + 1, 1, 0)
            of_units = (x.unflatten(1, (units, -1)).sum(2) for x in added)
            S, z = (x.flip(2).cumsum(2).flip(2) for x in of_units)
            grad_S, grad_z = S[:, :, 0], z[:, :, 0]
            tiles = -(-(length + read.lag + CHUNK - 1) // KEYS)
            if wants_k:
                grad_k = torch.empty(phi_k.shape, dtype=torch.float32, device=phi_k.device)
                triton_launch.launch(
                    triton_gradients.linear_keys, (batch * units, tiles),
                    *(phi_q, v, read.lowest, read.position, S, z, g_num, g_den, grad_k),
                    *(*strides(phi_q), *strides(v), *rows, units, heads // units, units // v.shape[1], *sizes),
                    **blocks,
                )  # fmt: skip
            if wants_v:
                grad_v = S.new_empty(batch, units, slots, width)
                triton_launch.launch(
                    triton_gradients.linear_values, (batch * units, tiles, -(-width // blocks["BLOCK_D"])),
                    *(phi_q, phi_k, read.lowest, read.position, S, g_num, grad_v),
                    *(*strides(phi_q), *strides(phi_k), *rows, units, heads // units, *sizes),
                    **blocks,
                )  # fmt: skip
                grad_v = grad_v.unflatten(1, (v.shape[1], -1)).sum(2)
        grads = zip((grad_q, grad_k, grad_v, grad_S, grad_z), (phi_q, phi_k, v, first_S, first_z), strict=True)
        return *(None if g is None or x is None else g.to(x.dtype) for g, x in grads), None


class HedgehogFeatures(torch.autograd.Function):
    """Compute Hedgehog's map of x (`triton_backend.hedgehog`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "B h T D"],
        weight: Float[Tensor, "M D N"],
        bias: Float[Tensor, "M N"] | None,
        activation: str,
        least: float,
    ) -> Float[Tensor, "B H T F"]:
        from linearize.ops import triton_kernels

        (batch, _, length, width), outputs, heads = x.shape, weight.shape[2], max(x.shape[1], len(weight))
        phi = x.new_empty(batch, heads, length, 2 * outputs, dtype=torch.float32)
        rows = min(CHUNK, power_of_2(length))
        triton_launch.launch(
            triton_kernels.hedgehog, (batch * heads, -(-length // rows)),
            *(x, weight, weight if bias is None else bias, phi, *strides(x)),
            *(heads, heads // x.shape[1], heads // len(weight), length, least),
            D=width, BLOCK_D=min(64, power_of_2(width)), N=outputs, BLOCK_N=power_of_2(outputs), M=rows,
            BIAS=bias is not None, SOFTMAX=activation != "exp", HALVES=activation == "softmax_halves", **OPTIONS,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, phi if activation != "exp" else None)
        ctx.activation, ctx.least = activation, least
        return phi

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        from linearize.ops import triton_gradients

        x, weight, bias, phi = ctx.saved_tensors
        g_phi = grad_outputs[0].contiguous()
        (batch, heads, length, features), matrices = g_phi.shape, len(weight)
        grad_y = g_phi.new_empty(batch, heads, length, features // 2)
        rows = min(CHUNK, power_of_2(length))
        triton_launch.launch(
            triton_gradients.hedgehog_outputs, (batch * heads, -(-length // rows)),
            *(g_phi if phi is None else phi, g_phi, grad_y, length, ctx.least),
            N=features // 2, BLOCK_N=power_of_2(features // 2), M=rows, SOFTMAX=phi is not None,
            HALVES=ctx.activation == "softmax_halves", num_stages=OPTIONS["num_stages"],
        )  # fmt: skip
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ weight.repeat_interleave(heads // matrices, dim=0).to(grad_y.dtype).mT
            grad_x = grad_x.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = repeat_kv(x, heads).to(grad_y.dtype).mT @ grad_y
            grad_weight = grad_weight.sum(0).unflatten(0, (matrices, -1)).sum(1).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_y.sum((0, 2)).unflatten(0, (matrices, -1)).sum(1).to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None
