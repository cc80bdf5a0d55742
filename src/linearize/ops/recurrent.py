"""One token at a time in constant memory and time: fold the key that leaves the window, then read."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.ops.heads import repeat_kv
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Span, TerracedSpan
from linearize.ops.linear_state import LinearState
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.reference import exponentials, softmax_scores


def linear_step(
    phi_q: Float[Tensor, "B H 1 F"],
    phi_k: Float[Tensor, "B Hk 1 F"],
    v: Float[Tensor, "B G 1 D"],
    *,
    beta: Float[Tensor, "B Hk 1 1"] | None = None,
    log_decay_k: Float[Tensor, "#B Hk 1 X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk 1 D"] | None = None,
    skipped_k: Float[Tensor, "#B Hk 1 X"] | None = None,
    skipped_v: Float[Tensor, "#B Hk 1 D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    position: Int[Tensor, " B"],
    state: LinearState,
) -> tuple[Partial, LinearState]:
    """Read the linear part for the query at `position`.

    `phi_k`, `v`, `beta` (of the delta rule) and the log decays are those of the token that enters the state, at
    position - span.fold_lag; `skipped` are the log decays of the steps lo(position) .. position, summed.
    With a `kernel`, phi_q and phi_k are what it makes features of.
    """
    dtype, heads = accumulation_dtype(v.dtype), phi_k.shape[1]
    phi_q, phi_k, v = phi_q.to(dtype), phi_k.to(dtype), repeat_kv(v, heads).to(dtype)
    if kernel is not None:
        phi_q, phi_k = kernel.features(phi_q), kernel.features(phi_k)
    phi_k = phi_k * (position - span.fold_lag >= span.sinks)[:, None, None, None]
    S, z = state.S, state.z
    readable = S, z
    if isinstance(span, TerracedSpan):
        assert state.next_S is not None and state.next_z is not None
        flush = (position % span.window_size == 0)[:, None, None]
        readable = torch.where(flush[..., None], state.next_S, S), torch.where(flush, state.next_z, z)
        S, z = state.next_S, state.next_z
    if log_decay_k is not None:
        S, z = S * log_decay_k.mT.exp().to(dtype), z * log_decay_k.squeeze(2).exp().to(dtype)
    if log_decay_v is not None:
        S = S * log_decay_v.exp().to(dtype)
    if beta is not None:
        v = beta.to(dtype) * (v - phi_k @ S)
    S, z = S + phi_k.mT @ v, z + phi_k.squeeze(2)
    state = LinearState(*readable, S, z) if isinstance(span, TerracedSpan) else LinearState(S, z)
    return linear_read(phi_q, state, skipped_k, skipped_v), state


def linear_read(
    phi_q: Float[Tensor, "B H 1 F"],
    state: LinearState,
    skipped_k: Float[Tensor, "#B Hk 1 X"] | None = None,
    skipped_v: Float[Tensor, "#B Hk 1 D"] | None = None,
) -> Partial:
    """What a query reads of the state; `skipped` are the log decays since, summed."""
    dtype = state.z.dtype
    q = phi_q.to(dtype).unflatten(1, (state.z.shape[1], -1)).squeeze(-2)
    if skipped_k is not None:
        q = q * skipped_k.exp().to(dtype)
    num, den = q @ state.S, (q @ state.z[..., None]).flatten(1, 2)
    if skipped_v is not None:
        num = num * skipped_v.exp().to(dtype)
    return Partial(num.flatten(1, 2)[:, :, None], den, torch.zeros_like(den))


def window_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    seen: Bool[Tensor, "#B #G S"],
    scaling: float,
    softcap: float | None = None,
) -> Partial:
    """Softmax over the slots that the query sees (always its own at least, unless the span is none)."""
    dtype, heads = accumulation_dtype(v.dtype), k.shape[1]
    q, k, v = q.to(dtype).unflatten(1, (heads, -1)).squeeze(-2), k.to(dtype), v.to(dtype)
    weights, top = exponentials(softmax_scores(q, k, scaling, softcap), seen[:, :, None])
    num = (weights @ v).flatten(1, 2)[:, :, None]
    return Partial(num, weights.sum(-1).flatten(1, 2)[..., None], top.flatten(1, 2)[..., None])
