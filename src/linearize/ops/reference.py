"""Define the primitives with explicit T x K weights, in quadratic time. Tests compare every other form with these."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.configs.spans import Span
from linearize.ops.decays import cumulative
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial, accumulation_dtype


def visible_keys(span: Span, layout: SequenceLayout) -> tuple[Bool[Tensor, "B T K"], Bool[Tensor, "B T K"]]:
    """Return which keys each query reads through the softmax window, and which through the linear part."""
    query, key = layout.query_position[:, :, None], layout.key_position[:, None, :]
    seen = (layout.query_document[:, :, None] == layout.key_document[:, None, :]) & (query >= 0) & (key >= 0)
    seen &= key <= query
    softmax = (key >= span.lo(query)) | (key < span.sinks)
    return seen & softmax, seen & ~softmax


def linear_scan(x: LinearInputs) -> Partial:
    """Return num_n = sum_j (phi_q(n) . D_k(n,j) phi_k(j)) D_v(n,j) v_j over sinks <= j < lo(n), and den_n.

    D(n,j) is exp of the sum of the log decays of steps j+1 .. n, elementwise: one number per head (X = 1) or per
    feature (X = F) on the feature axis, and one per value on the value axis. Log decays are <= 0. den_n has 1 in place
    of v_j, and no D_v. `state` is that before the first slot.

    With a `kernel`, phi_q and phi_k are its inputs instead of features, and there are no decays.
    """
    (heads, length), span, layout, kernel, state = x.queries().shape[1:3], x.span, x.layout, x.kernel, x.state
    dtype = accumulation_dtype(x.v.dtype)
    phi_q, phi_k, v = x.queries().to(dtype), repeat_kv(x.phi_k, heads).to(dtype), repeat_kv(x.v, heads).to(dtype)
    mask = visible_keys(span, layout)[1][:, None]
    sums_k, sums_v = (
        None if decay is None else repeat_kv(cumulative(decay, span, layout), heads)
        for decay in (x.log_decay_k, x.log_decay_v)
    )
    if kernel is None:
        weights = kernel_weights(phi_q, phi_k, sums_k, mask)
    else:
        assert sums_k is None and sums_v is None
        weights = kernel.scores(phi_q @ phi_k.mT) * mask
        phi_q = phi_q if state is None else kernel.features(phi_q)
    den = weights.sum(-1)
    if sums_v is None:
        num = weights @ v
    else:
        num = torch.einsum("bhtk,bhtkd,bhkd->bhtd", weights, _pairwise(sums_v, length, mask).to(dtype), v)
    if state is not None:
        carried = ((layout.query_document == 0) & (layout.query_position >= 0))[:, None, :, None]
        read = phi_q * carried
        if sums_k is not None:
            read = read * sums_k[:, :, -length:].exp().to(dtype)
        carried_num = read @ repeat_kv(state.S, heads).to(dtype)
        if sums_v is not None:
            carried_num = carried_num * sums_v[:, :, -length:].exp().to(dtype)
        num = num + carried_num
        den = den + (read @ repeat_kv(state.z[..., None], heads).to(dtype)).squeeze(-1)
    return Partial(num, den, torch.zeros_like(den))


def delta_values(x: LinearInputs) -> Float[Tensor, "B Hk K D"]:
    """Return u_j = beta_j (v_j - (D_k S)^T phi_k(j)): the delta rule adds phi_k(j) u_j^T to S.

    With u in place of v, `linear_scan` and `linear_state` compute the (gated) delta rule. u is 0 in slots whose keys
    never enter the state.
    """
    assert x.beta is not None
    dtype, heads, span, layout, state = accumulation_dtype(x.v.dtype), x.phi_k.shape[1], x.span, x.layout, x.state
    phi_k, v, beta = x.phi_k.to(dtype), repeat_kv(x.v, heads).to(dtype), x.beta.to(dtype)
    enters = layout.key_position >= span.sinks
    pairs = (layout.key_document[:, :, None] == layout.key_document[:, None]) & enters[:, :, None] & enters[:, None]
    sums = None if x.log_decay_k is None else cumulative(x.log_decay_k, span, layout)
    beta = beta * enters[:, None, :, None]
    u = beta * v
    if state is not None:
        read = phi_k * (layout.key_document == 0)[:, None, :, None]
        if sums is not None:
            read = read * sums.exp().to(dtype)
        u = u - beta * (read @ state.S.to(dtype))
    overlaps = beta * kernel_weights(phi_k, phi_k, sums, pairs.tril(-1)[:, None])
    return torch.linalg.solve_triangular(overlaps, u, upper=False, unitriangular=True)


def kernel_weights(
    q: Float[Tensor, "B H T F"],
    k: Float[Tensor, "B H K F"],
    sums: Float[Tensor, "#B H K X"] | None,
    mask: Bool[Tensor, "#B 1 T K"],
) -> Float[Tensor, "B H T K"]:
    """Return q_n . D(n,j) k_j where `mask` is true, 0 elsewhere; the queries' slots are the last T key slots.

    `sums` are the cumulative log decays up to each slot (`decays.cumulative`).
    """
    if sums is None:
        return (q @ k.mT) * mask
    decay = _pairwise(sums, q.shape[2], mask).to(q.dtype)
    if decay.shape[-1] == 1:
        return (q @ k.mT) * mask * decay.squeeze(-1)
    return torch.einsum("bhtf,bhtkf,bhkf->bhtk", q, decay, k) * mask


def _pairwise(sums: Float[Tensor, "B H K X"], length: int, mask: Tensor) -> Float[Tensor, "B H T K X"]:
    difference = sums[:, :, -length:, None] - sums[:, :, None]
    return difference.masked_fill(~mask[..., None], 0).exp()


def window_softmax(x: SoftmaxInputs) -> Partial:
    """Return num_n = sum_j e^{s_nj - c_n} v_j over the softmax keys, den_n without v_j, and c_n = max_j s_nj."""
    dtype, heads = accumulation_dtype(x.v.dtype), x.q.shape[1]
    q, k, v = x.q.to(dtype), repeat_kv(x.k, heads).to(dtype), repeat_kv(x.v, heads).to(dtype)
    mask = visible_keys(x.span, x.layout)[0][:, None]
    weights, top = exponentials(softmax_scores(q, k, x.scaling, x.softcap), mask)
    return Partial(weights @ v, weights.sum(-1), top)


def softmax_scores(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H K D"], scaling: float, softcap: float | None
) -> Float[Tensor, "B H T K"]:
    """Return the scores s_nj: q_n.k_j scaled and, unless `softcap` is None, soft-capped."""
    scores = (q * scaling) @ k.mT
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def exponentials(
    scores: Float[Tensor, "B H T K"], mask: Bool[Tensor, "#B #H #T K"]
) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H T"]]:
    """Return e^{s_nj - c_n} where `mask` is true, 0 elsewhere; and c_n, the largest of these s_nj, 0 if none is."""
    scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    return torch.exp(scores - top), top.squeeze(-1)
