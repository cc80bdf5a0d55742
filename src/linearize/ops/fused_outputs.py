"""Outputs in one launch, by Triton kernels of our own: from the sums of a prompt's parts, and of one more token.

Forward alone. What the kernels do not define is served by torch's operations (`mixers.one_token`, `mixers.combine`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.ops import fused
from linearize.ops.linear_state import LinearState
from linearize.ops.partial import Partial
from linearize.ops.window import LOG2_E

MOST_GROUPED = 64  # query heads of one program


class OneQuotient(NamedTuple):
    """An output (g num_w + num_l) / (g den_w + den_l) of window and linear part (LoLCATs eq. 7), or of one alone.

    Attributes:
        factor: g before the sigmoid, where there are both.
        least: the denominator is no less.
    """

    factor: Float[Tensor, " H"] | None
    least: float


def serves_quotient(window: Partial | None, linear: Partial | None) -> bool:
    """Whether `quotient` is for these sums: no gradient is wanted."""
    sums = [x for part in (window, linear) if part is not None for x in (part.num, part.den)]
    return not fused.wants_more(tuple(sums), None)


def quotient(
    window: Partial | None, linear: Partial | None, how: OneQuotient, dtype: torch.dtype
) -> Float[Tensor, "B H T D"]:
    """The output in `dtype`. It lies as it is read next: the heads of a token side by side."""
    from linearize.ops import triton_outputs

    parts = [[x.contiguous() for x in (part.num, part.den)] for part in (window, linear) if part is not None]
    (num_w, den_w), (num_l, den_l) = parts[0], parts[-1]
    (batch, heads, length, width), rows = num_w.shape, min(32, fused.power_of_2(num_w.shape[2]))
    y = num_w.new_empty(batch, length, heads, width, dtype=dtype)
    fused.launch(
        triton_outputs.quotient, (batch * heads, -(-length // rows)),
        *(num_w, den_w, num_l, den_l, num_w if how.factor is None else how.factor, y, heads, length, how.least),
        WINDOW=window is not None, LINEAR=linear is not None, D=width, BLOCK_D=fused.power_of_2(width), M=rows,
    )  # fmt: skip
    return y.transpose(1, 2)


class LinearStep(NamedTuple):
    """The linear part of one more token.

    Attributes:
        phi_q, state: what is read, after what enters.
        phi_k, enters, slot: what enters the state, times 1 or 0, and the slot of its value; None: nothing does.
        begins: whether a block does, where the state has a `next_S`.
    """

    phi_q: Float[Tensor, "B H 1 F"]
    state: LinearState
    phi_k: Float[Tensor, "B Hk 1 F"] | None
    enters: Float[Tensor, "B 1 1 1"]
    slot: int
    begins: Bool[Tensor, "B 1 1"] | None


def serves_one_token(q: Float[Tensor, "B H 1 D"], heads: int, state: LinearState | None) -> bool:
    """Whether `one_token` is for these inputs, of so many KV heads, where no gradient is wanted."""
    widest, units = (q.shape[3], heads) if state is None else (max(state.S.shape[2:]), state.S.shape[1])
    other = torch.is_grad_enabled() or q.dtype == torch.float64
    return not (other or widest > fused.WIDEST or q.shape[1] > MOST_GROUPED * units)


def one_token(
    q: Float[Tensor, "B H 1 D"],
    new: tuple[Float[Tensor, "B G 1 D"], Float[Tensor, "B G 1 D"]],
    slots: tuple[Float[Tensor, "B G S D"], Float[Tensor, "B G S D"]],
    bias: Float[Tensor, "B 1 S_and_1"] | None,
    position: Int[Tensor, " B"],
    held: tuple[Float[Tensor, "B G C D"], Float[Tensor, "B G C D"], Int[Tensor, "B G C"]] | None,
    linear: LinearStep | None,
    how: OneQuotient,
    *,
    sinks: int,
    scaling: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "B H 1 D"], tuple[Tensor, Tensor], LinearState | None]:
    """The output of one more token, the slots behind it, and the linear state: in one launch.

    Softmax is over the slots, whose scores get `bias`, the token itself, and what a cache holds, -1 being the position
    of nothing. `bias` None: there is no window. The first `sinks` slots are those of sinks that have left the others
    (`mixer_state.push_slot`).
    """
    from linearize.ops import triton_outputs

    q, new_k, new_v, k, v = (fused.rows_of_numbers(x.to(q.dtype)) for x in (q, *new, *slots))
    (batch, heads, _, width), units, features, window = q.shape, k.shape[1], 16, bias is not None
    unread: Tensor = q  # in the place of what there is none of
    held_k, held_v, held_position = k, v, unread
    if held is not None:
        held_k, held_v, held_position = *map(fused.rows_of_numbers, held[:2]), held[2]
    phi_q = phi_k = enters = begins = unread
    before, after, state, slot = [unread] * 4, [unread] * 4, None, 0
    if linear is not None:
        phi_q, enters = linear.phi_q.contiguous(), linear.enters.contiguous()
        found = [x.contiguous() for x in linear.state.named_tensors().values()]
        (units, features), state, slot, before[: len(found)] = found[1].shape[1:], linear.state, linear.slot, found
        begins = unread if linear.begins is None else linear.begins
        if linear.phi_k is not None:
            phi_k, made = fused.rows_of_numbers(linear.phi_k), [torch.empty_like(x) for x in found]
            after[: len(made)], state = made, LinearState(*made)
    y, next_k, next_v = q.new_empty(q.shape), *(x.new_empty(x.shape) if window else x for x in (k, v))
    side, group = min(64, fused.power_of_2(width)), heads // units
    fused.launch(
        triton_outputs.one_token, (batch * units, -(-width // side)),
        *(q, new_k, new_v, k, v, unread if bias is None else bias, position, held_k, held_v),
        held_position.contiguous(),
        *(phi_q, phi_k, enters, *before, begins, unread if how.factor is None else how.factor),
        *(y, next_k, next_v, *after),
        *(*q.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *fused.strides(k), *fused.strides(v)),
        *(*fused.strides(held_k), *fused.strides(held_v), *phi_k.stride()[:2]),
        0 if bias is None else fused.between_rows(bias),
        *(units, group, units // k.shape[1], k.shape[2], sinks, slot, held_k.shape[2]),
        *(scaling * LOG2_E, 1.0 if softcap is None else softcap, how.least),
        WINDOW=window, CACHE=held is not None, LINEAR=linear is not None, WRITES=phi_k is not unread,
        AHEAD=begins is not unread, SOFTCAP=softcap is not None, D=width, BLOCK_D=fused.power_of_2(width), SIDE=side,
        F=features, BLOCK_F=fused.power_of_2(features), M=fused.power_of_2(group), N=32, **fused.HOW,
    )  # fmt: skip
    return y, (next_k, next_v), state
