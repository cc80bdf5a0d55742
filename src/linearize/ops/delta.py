"""The delta rule, as values for the additive recurrence: chunk by chunk, in O(T) time and memory."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.configs.spans import NoSpan
from linearize.ops.chunk_recurrence import ChunkRecurrence, Masks, power_of_two_chunks
from linearize.ops.decay_products import decayed_scores
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs
from linearize.ops.linear_state import ticking
from linearize.ops.partial import accumulation_dtype
from linearize.ops.recomputed_scan import scan


def delta_values(x: LinearInputs) -> Float[Tensor, "B Hk K D"]:
    """u_j = beta_j (v_j - (D_k S)^T phi_k(j)), as `reference.delta_values`.

    A key is written when it comes, whatever its window: the span only says which keys are sinks.
    """
    assert x.beta is not None
    dtype, slots = accumulation_dtype(x.v.dtype), power_of_two_chunks(x.layout)
    batch, heads, _, features = x.phi_k.shape
    beta = x.beta * (x.layout.key_position >= x.span.sinks)[:, None, :, None]
    tensors = [slots.spread(tensor.to(dtype)) for tensor in (x.phi_k, repeat_kv(x.v, heads), beta)]
    if x.log_decay_k is not None:
        ticks = ticking(x.log_decay_k.to(dtype), x.span, x.layout)
        tensors.append(slots.spread(ticks.expand(batch, -1, -1, -1)))
    width = x.v.shape[3]
    S = x.v.new_zeros(batch, heads, features, width, dtype=dtype) if x.state is None else x.state.S.to(dtype)
    body = ChunkRecurrence(slots, NoSpan(), tensors[0], S, _segment)
    (u,) = scan(body, (width,), (S,), *tensors)
    return slots.collect(u, slots.length)


def _segment(
    masks: Masks,
    S: Float[Tensor, "b h F D"],
    k: Float[Tensor, "b h L F"],
    v: Float[Tensor, "b h n C D"],
    beta: Float[Tensor, "b h n C 1"],
    log_decay: Float[Tensor, "b h n C X"] | None = None,
) -> tuple[Float[Tensor, "b h L D"], Float[Tensor, "b h F D"]]:
    """u of n chunks of C slots, and the next S. Within a chunk u solves a triangular system (the UT transform):

    u_i + beta_i sum_{j < i} (k_i . e^{G_i - G_j} k_j) u_j = beta_i (v_i - (e^{G_i} S)^T k_i).
    """
    k, beta = k.unflatten(2, v.shape[2:4]), beta * masks.key
    overlaps, reading, entering, kept = decayed_scores(k[..., None, :], k, log_decay)
    overlaps = _flush(overlaps.squeeze(-2) * masks.near * beta)
    identity = torch.eye(k.shape[3], dtype=k.dtype, device=k.device).expand_as(overlaps)
    inverse = _flush(torch.linalg.solve_triangular(overlaps, identity, upper=False, unitriangular=True)) * beta.mT
    written, erasing = inverse @ v, _flush(inverse @ (reading.squeeze(-2) * masks.reads))
    entering, kept, u = (entering * masks.enters).mT, (kept * masks.keeps)[..., None], []
    for c in range(k.shape[2]):
        u.append(written[:, :, c] - erasing[:, :, c] @ S)
        S = S * kept[:, :, c] + entering[:, :, c] @ u[-1]
    return torch.cat(u, dim=2), S


def _flush(x: Tensor) -> Tensor:
    """0 for numbers whose products would be denormal, with which arithmetic is up to a hundred times slower."""
    return torch.nn.functional.hardshrink(x, torch.finfo(x.dtype).tiny * 1e8)
