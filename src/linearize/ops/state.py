"""The linear part's carried state."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from linearize.ops.layout import Layout
from linearize.ops.partial import accumulation_dtype
from linearize.ops.span import Span, TerracedSpan


@dataclass(frozen=True)
class LinearState:
    """S = sum phi(k) v^T and z = sum phi(k) over the keys that the last query could read (METHODS, recurrence).

    For terraced spans `pending_S` and `pending_z` hold the block that is being folded: it becomes readable as a whole
    when the next block of queries begins, and one key is added to it per step, so a step costs the same at any
    position.
    """

    S: Float[Tensor, "B Hk F D"]
    z: Float[Tensor, "B Hk F"]
    pending_S: Float[Tensor, "B Hk F D"] | None = None
    pending_z: Float[Tensor, "B Hk F"] | None = None


def expand_values(v: Float[Tensor, "B G K D"], heads: int) -> Float[Tensor, "B Hk K D"]:
    """Values per linear head: repeated where the key map is per query head and heads share values (GQA)."""
    return v if v.shape[1] == heads else v.repeat_interleave(heads // v.shape[1], dim=1)


def linear_state(
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> LinearState:
    """The state after the last token: keys of its document with sinks <= position < lo(its position).

    `state` counts only where a row is still in the carried document.
    """
    dtype = accumulation_dtype(v.dtype)
    phi_k, v = phi_k.to(dtype), expand_values(v, phi_k.shape[1]).to(dtype)
    last = layout.count[:, None] - 1
    position, lo = layout.key_position, span.lo(last)
    mine = (layout.key_document == layout.last_document) & (position >= span.sinks)

    def fold(member: Bool[Tensor, "#B K"]) -> tuple[Tensor, Tensor]:
        masked = phi_k * member[:, None, :, None]
        return masked.transpose(-1, -2) @ v, masked.sum(-2)

    S, z = fold(mine & (position < lo))
    if state is not None:
        goes_on = (layout.last_document == 0)[:, :, None].to(dtype)
        S, z = S + state.S * goes_on[..., None], z + state.z * goes_on
    if not isinstance(span, TerracedSpan):
        return LinearState(S, z)
    # A carried pending block needs no carrying over: its keys are still among the context slots.
    return LinearState(S, z, *fold(mine & (position >= lo) & (position <= last - span.fold_lag)))
