"""The definition: both primitives with explicit T x K weights. Quadratic; what every other form is held to."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.ops.layout import Layout
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.span import Span
from linearize.ops.state import LinearState, expand_values


def visible_keys(span: Span, layout: Layout) -> tuple[Bool[Tensor, "B T K"], Bool[Tensor, "B T K"]]:
    """Which keys each query reads through the softmax window and which through the linear part."""
    query, key = layout.query_position[:, :, None], layout.key_position[:, None, :]
    seen = (layout.query_document[:, :, None] == layout.key_document[:, None, :]) & (query >= 0) & (key >= 0)
    seen &= key <= query
    softmax = (key >= span.lo(query)) | (key < span.sinks)
    return seen & softmax, seen & ~softmax


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """num_n = sum_{j < lo(n)} phi_q(q_n).phi_k(k_j) v_j and den_n, the same with 1 for v_j (METHODS, common form)."""
    dtype = accumulation_dtype(v.dtype)
    heads = phi_q.shape[1]
    phi_q, phi_k = phi_q.to(dtype), expand_values(phi_k, heads).to(dtype)
    v = expand_values(v, heads).to(dtype)
    mask = visible_keys(span, layout)[1][:, None]
    weights = (phi_q @ phi_k.transpose(-1, -2)) * mask
    num, den = weights @ v, weights.sum(-1)
    if state is not None:
        carried = ((layout.query_document == 0) & (layout.query_position >= 0))[:, None, :, None]
        read = phi_q * carried
        num = num + read @ expand_values(state.S, heads)
        den = den + (read @ expand_values(state.z[..., None], heads)).squeeze(-1)
    return Partial(num, den, torch.zeros_like(den))


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
    """num_n = sum_j e^{s_nj - c_n} v_j over the softmax keys, den_n likewise, c_n the largest of the scores s_nj."""
    dtype = accumulation_dtype(v.dtype)
    q, k, v = q.to(dtype), expand_values(k, q.shape[1]).to(dtype), expand_values(v, q.shape[1]).to(dtype)
    mask = visible_keys(span, layout)[0][:, None]
    scores = (q * scaling) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(scores - top)
    return Partial(weights @ v, weights.sum(-1), top.squeeze(-1))
