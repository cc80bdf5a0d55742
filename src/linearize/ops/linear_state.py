"""The linear part's carried state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.ops.heads import repeat_kv
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout, Span, TerracedSpan
from linearize.ops.partial import accumulation_dtype

SLOTS_AT_ONCE = 256  # of which features are made


@dataclass(frozen=True)
class LinearState:
    """S and z as of the last key that the last query could read, at lo(n) - 1, with the decays up to that step.

    For terraced spans `next_S` and `next_z` are the same recurrence some keys further: they become readable as a whole
    when the next block of queries begins, and one key is added to them per step, so a step costs the same at any
    position.
    """

    S: Float[Tensor, "B Hk F D"]
    z: Float[Tensor, "B Hk F"]
    next_S: Float[Tensor, "B Hk F D"] | None = None
    next_z: Float[Tensor, "B Hk F"] | None = None

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, by the name of its field."""
        following = {} if self.next_S is None or self.next_z is None else {"next_S": self.next_S, "next_z": self.next_z}
        return {"S": self.S, "z": self.z} | following


def linear_state(
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> LinearState:
    """The state after the last token: keys of its document with sinks <= position < lo(its position).

    `state` counts only where a row is still in the carried document. For the delta rule, v are its `delta_values`.
    With a `kernel`, phi_k is what it makes features of.
    """
    keys: dict[str, Any] = {"phi_k": phi_k, "v": v, "log_decay_k": log_decay_k, "log_decay_v": log_decay_v}
    given: dict[str, Any] = {"kernel": kernel, "span": span, "layout": layout}
    terraced = isinstance(span, TerracedSpan)
    if layout.uniform:  # the keys lie side by side, and what is readable later begins where that which is now ends
        last = layout.length - 1
        lowest = max(span.sinks, int(span.lo(torch.tensor(last, device="cpu"))))
        readable = with_keys(**_slots(keys, span.sinks, lowest), which=None, **given, state=state)
        if terraced:
            ends = last - span.fold_lag + 1
            following = with_keys(**_slots(keys, lowest, ends), which=None, **given, state=readable)
    else:
        last = layout.count[:, None] - 1
        mine = layout.key_document == layout.last_document
        if state is not None:
            goes_on = (layout.last_document == 0)[:, :, None].to(state.z.dtype)
            state = LinearState(state.S * goes_on[..., None], state.z * goes_on)
        readable = with_keys(**keys, which=mine & (layout.key_position < span.lo(last)), **given, state=state)
        if terraced:
            which = mine & (layout.key_position <= last - span.fold_lag)
            following = with_keys(**keys, which=which, **given, state=state)
    return LinearState(readable.S, readable.z, following.S, following.z) if terraced else readable


def _slots(keys: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: x if x is None else x[:, :, start : max(start, stop)] for name, x in keys.items()}


def with_keys(
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    which: Bool[Tensor, "#B K"] | None,
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> LinearState:
    """S and z with these of the keys, but for sinks, and the decays of their steps alone.

    `which` None: all of them; none is a sink.
    """
    dtype = accumulation_dtype(v.dtype)
    phi_k, v = phi_k.to(dtype), repeat_kv(v, phi_k.shape[1]).to(dtype)
    counts = None if which is None else (which & (layout.key_position >= span.sinks))[:, None, :, None]
    S, z = (None, None) if state is None else (state.S, state.z[..., None])
    if kernel is not None:
        added_S, added_z = _sums_of_features(kernel, phi_k, counts, v)
    else:
        keys, values = phi_k if counts is None else phi_k * counts, v
        if log_decay_k is not None:
            after, total = remaining(log_decay_k, span, layout, which)
            keys = keys * after.exp().to(dtype)
            if S is not None and z is not None:
                S, z = S * total.mT.exp().to(dtype), z * total.mT.exp().to(dtype)
        if log_decay_v is not None:
            after, total = remaining(log_decay_v, span, layout, which)
            values = values * after.exp().to(dtype)
            S = None if S is None else S * total.exp().to(dtype)
        added_S, added_z = keys.mT @ values, keys.sum(2)
    return (
        LinearState(added_S, added_z) if S is None or z is None else LinearState(S + added_S, z.squeeze(-1) + added_z)
    )


def _sums_of_features(
    kernel: Kernel, x: Float[Tensor, "B Hk K X"], counts: Bool[Tensor, "#B 1 K 1"] | None, v: Float[Tensor, "B Hk K D"]
) -> tuple[Float[Tensor, "B Hk F D"], Float[Tensor, "B Hk F"]]:
    """The sums over the keys that count of phi(x) v^T and of phi(x); no more than some features exist at a time."""
    S = z = None
    for start in range(0, max(1, x.shape[2]), SLOTS_AT_ONCE):
        some = slice(start, start + SLOTS_AT_ONCE)
        keys, values = kernel.features(x[:, :, some]), v[:, :, some]
        keys = keys if counts is None else keys * counts[:, :, some]
        added_S, added_z = keys.mT @ values, keys.sum(2)
        S, z = (added_S, added_z) if S is None or z is None else (S + added_S, z + added_z)
    assert S is not None and z is not None
    return S, z


def ticking(log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: Layout) -> Float[Tensor, "B Hk K X"]:
    """The log decays, 0 where nothing decays: in slots without a key, and before the first linear key can be there."""
    ticks = layout.key_position >= span.sinks
    if layout.uniform and not span.sinks:
        return log_decay
    return torch.where(ticks[:, None, :, None], log_decay, 0)


def cumulative(log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: Layout) -> Float[Tensor, "B Hk K X"]:
    """G_n, the sum of the log decays of slots 0..n, in float64: what matters are differences of large numbers."""
    return ticking(log_decay, span, layout).double().cumsum(2)


def remaining(
    log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: Layout, until: Bool[Tensor, "#B K"] | None
) -> tuple[Float[Tensor, "B Hk K X"], Float[Tensor, "B Hk 1 X"]]:
    """Sums of the log decays of the steps `until` after each slot, and of all of them, in float64. None: all tick."""
    steps = log_decay.double()
    if until is not None:
        steps = torch.where(until[:, None, :, None], ticking(log_decay, span, layout).double(), 0)
    total = steps.sum(2, keepdim=True)
    return total - steps.cumsum(2), total
