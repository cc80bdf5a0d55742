"""One token at a time in constant memory and time: fold the key that leaves the window, then read."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.span import Span, TerracedSpan
from linearize.ops.state import LinearState, expand_values


def linear_step(
    phi_q: Float[Tensor, "B H 1 F"],
    phi_k: Float[Tensor, "B Hk 1 F"],
    v: Float[Tensor, "B G 1 D"],
    *,
    span: Span,
    position: Int[Tensor, " B"],
    state: LinearState,
) -> tuple[Partial, LinearState]:
    """Read the linear part for the query at `position`; `phi_k` and `v` are of the key at position - span.fold_lag."""
    dtype, heads = accumulation_dtype(v.dtype), phi_k.shape[1]
    phi_q, phi_k, v = phi_q.to(dtype), phi_k.to(dtype), expand_values(v, heads).to(dtype)
    phi_k = phi_k * (position - span.fold_lag >= span.sinks)[:, None, None, None]
    S, z, added_S, added_z = state.S, state.z, phi_k.transpose(-1, -2) @ v, phi_k.squeeze(-2)
    if isinstance(span, TerracedSpan):
        assert state.pending_S is not None and state.pending_z is not None
        flush = (position % span.window_size == 0)[:, None, None]
        S, z = S + state.pending_S * flush[..., None], z + state.pending_z * flush
        pending_S = state.pending_S * ~flush[..., None] + added_S
        state = LinearState(S, z, pending_S, state.pending_z * ~flush + added_z)
    else:
        state = LinearState(S + added_S, z + added_z)
    q = phi_q.unflatten(1, (heads, -1)).squeeze(-2)
    num = (q @ state.S).flatten(1, 2)[:, :, None]
    den = (q @ state.z[..., None]).flatten(1, 2)
    return Partial(num, den, torch.zeros_like(den)), state


def window_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    seen: Bool[Tensor, "B S"],
    scaling: float,
    softcap: float | None = None,
) -> Partial:
    """Softmax over the slots that the query sees (always its own at least, unless the span is none)."""
    dtype, heads = accumulation_dtype(v.dtype), k.shape[1]
    q, k, v = (q.to(dtype) * scaling).unflatten(1, (heads, -1)).squeeze(-2), k.to(dtype), v.to(dtype)
    scores = q @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(scores - top)
    num = (weights @ v).flatten(1, 2)[:, :, None]
    return Partial(num, weights.sum(-1).flatten(1, 2)[..., None], top.flatten(1, 2))
