"""Compute the carried state of the linear part."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.configs.spans import TerracedSpan
from linearize.ops.decays import remaining
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.kernel import Kernel
from linearize.ops.partial import accumulation_dtype

SLOTS_AT_ONCE = 256  # slots whose features exist at a time


def linear_state(x: LinearInputs) -> LinearState:
    """Return the state after the last token, of its document's keys with sinks <= position < lo(last position).

    `x.state` counts only in rows that are still in the carried document. For the delta rule, x.v are `delta_values`.
    """
    span, layout, state = x.span, x.layout, x.state
    terraced, following = isinstance(span, TerracedSpan), None
    if layout.uniform:  # the keys are adjacent, and the next state's keys follow those of the readable one
        last = layout.length - 1
        lowest = max(span.sinks, int(span.lo(torch.tensor(last, device="cpu"))))
        readable = with_keys(_slots(x, span.sinks, lowest), None)
        if terraced:
            ends = last - span.linear_delay + 1
            following = with_keys(replace(_slots(x, lowest, ends), state=readable), None)
    else:
        last = layout.count[:, None] - 1
        mine = layout.key_document == layout.last_document
        if state is not None:
            goes_on = (layout.last_document == 0)[:, :, None].to(state.z.dtype)
            x = replace(x, state=LinearState(state.S * goes_on[..., None], state.z * goes_on))
        readable = with_keys(x, mine & (layout.key_position < span.lo(last)))
        if terraced:
            following = with_keys(x, mine & (layout.key_position <= last - span.linear_delay))
    return readable if following is None else LinearState(readable.S, readable.z, following.S, following.z)


def _slots(x: LinearInputs, start: int, stop: int) -> LinearInputs:
    """Return the inputs of the slots start..stop of a uniform row, without queries."""
    stop = max(start, stop)
    names = "phi_k", "v", "log_decay_k", "log_decay_v"
    tensors = {name: getattr(x, name) for name in names}
    some = {name: y if y is None else y[:, :, start:stop] for name, y in tensors.items()}
    return replace(x, **some, phi_q=None, beta=None)


def with_keys(x: LinearInputs, which: Bool[Tensor, "#B K"] | None) -> LinearState:
    """Return S and z after adding these keys, without sinks, with the decays of their steps alone.

    `which` None: add all keys, none of which is a sink.
    """
    dtype, state = accumulation_dtype(x.v.dtype), x.state
    phi_k, v = x.phi_k.to(dtype), repeat_kv(x.v, x.phi_k.shape[1]).to(dtype)
    counts = None if which is None else (which & (x.layout.key_position >= x.span.sinks))[:, None, :, None]
    S, z = (None, None) if state is None else (state.S, state.z[..., None])
    if x.kernel is not None:
        added_S, added_z = _sums_of_features(x.kernel, phi_k, counts, v)
    else:
        keys, values = phi_k if counts is None else phi_k * counts, v
        if x.log_decay_k is not None:
            after, total = remaining(x.log_decay_k, x.span, x.layout, which)
            keys = keys * after.exp().to(dtype)
            if S is not None and z is not None:
                S, z = S * total.mT.exp().to(dtype), z * total.mT.exp().to(dtype)
        if x.log_decay_v is not None:
            after, total = remaining(x.log_decay_v, x.span, x.layout, which)
            values = values * after.exp().to(dtype)
            S = None if S is None else S * total.exp().to(dtype)
        added_S, added_z = keys.mT @ values, keys.sum(2)
    return (
        LinearState(added_S, added_z) if S is None or z is None else LinearState(S + added_S, z.squeeze(-1) + added_z)
    )


def _sums_of_features(
    kernel: Kernel, x: Float[Tensor, "B Hk K X"], counts: Bool[Tensor, "#B 1 K 1"] | None, v: Float[Tensor, "B Hk K D"]
) -> tuple[Float[Tensor, "B Hk F D"], Float[Tensor, "B Hk F"]]:
    """Return the sums of phi(x) v^T and of phi(x) over the keys that count, a bounded number of features at a time."""
    S = z = None
    for start in range(0, max(1, x.shape[2]), SLOTS_AT_ONCE):
        some = slice(start, start + SLOTS_AT_ONCE)
        keys, values = kernel.features(x[:, :, some]), v[:, :, some]
        keys = keys if counts is None else keys * counts[:, :, some]
        added_S, added_z = keys.mT @ values, keys.sum(2)
        S, z = (added_S, added_z) if S is None or z is None else (S + added_S, z + added_z)
    assert S is not None and z is not None
    return S, z
