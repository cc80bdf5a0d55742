"""The linear part where features or values decay each at their own rate: chunk by chunk, in O(T) time and memory.

A query reads the state from before its window, and what it reads decays on through the window. So keys are delayed by
the window, queries take in the decays of the steps that they skip, and what is left is a scan without a window.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.configs.spans import TerracedSpan
from linearize.ops.chunk_recurrence import ChunkRecurrence, Masks, power_of_two_chunks
from linearize.ops.decay_products import decay_factor, decayed_scores, decayed_sums
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs
from linearize.ops.linear_state import ticking
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.recomputed_scan import scan


def linear_scan(x: LinearInputs) -> Partial:
    """The linear part (`reference.linear_scan`) with decays on the feature axis, the value axis, or both."""
    dtype, slots, span, layout = accumulation_dtype(x.v.dtype), power_of_two_chunks(x.layout), x.span, x.layout
    batch, heads, _, features = x.phi_k.shape
    q, k, v = (slots.spread(tensor.to(dtype)) for tensor in (x.queries(), x.phi_k, repeat_kv(x.v, heads)))
    decays, skipped = {}, {}
    lag = min(span.fold_lag, q.shape[2])
    for name, log_decay in (("log_decay_k", x.log_decay_k), ("log_decay_v", x.log_decay_v)):
        if log_decay is not None:
            decays[name] = slots.spread(ticking(log_decay.to(dtype), span, layout).expand(batch, -1, -1, -1))
            if lag:
                skipped[name] = decay_factor(repeat_kv(_last(decays[name], lag, slots.chunk), q.shape[1]))
    if "log_decay_k" in skipped:
        q = q * skipped["log_decay_k"]
    if x.state is None:
        S = x.phi_k.new_zeros(batch, heads, features, v.shape[3] + 1, dtype=dtype)
    else:
        S = torch.cat([x.state.S, x.state.z[..., None]], dim=-1).to(dtype)

    # A register for all keys, and for terraced spans one for those before the terrace.
    S = S[:, :, None].expand(-1, -1, 1 + isinstance(span, TerracedSpan), -1, -1)
    body = ChunkRecurrence(slots, span, q, S, partial(_segment, tuple(decays)))
    (out,) = scan(body, S.shape[-1:], (S,), q, k, v, *decays.values())
    num, den = out[..., :-1], out[..., -1:]
    if "log_decay_v" in skipped:
        num = num * skipped["log_decay_v"]
    den = slots.collect(den, layout.length).squeeze(-1)
    return Partial(slots.collect(num, layout.length), den, torch.zeros_like(den))


def _last(steps: Float[Tensor, "B h P X"], count: int, chunk: int) -> Float[Tensor, "B h P X"]:
    """The sum of the last `count` steps at each slot: by products with 0 and 1, much faster than a running sum."""
    chunks, slot = steps.unflatten(2, (-1, chunk)), torch.arange(chunk, device=steps.device)
    n, whole = chunks.shape[2], count // chunk
    # The chunks between the slot's own and those that may hold the first step count as a whole. In float64, since these
    # are differences.
    before = torch.nn.functional.pad(chunks.sum(3).double().cumsum(2), (0, 0, 1, 0))[:, :, :n]
    last = before - torch.nn.functional.pad(before, (0, 0, max(whole - 1, 0), 0))[:, :, :n]
    last = last.to(steps.dtype)[:, :, :, None]
    for back in sorted({0, whole, whole + 1}):
        distance = slot[:, None] - slot + back * chunk
        inside = ((distance >= 0) & (distance < count)).to(steps.dtype)
        last = last + torch.nn.functional.pad(inside @ chunks, (0, 0, 0, 0, back, 0))[:, :, :n]
    return last.flatten(2, 3)


def _segment(
    names: tuple[str, ...],
    masks: Masks,
    S: Float[Tensor, "b h R F E"],
    q: Float[Tensor, "b H L F"],
    k: Float[Tensor, "b h n C F"],
    v: Float[Tensor, "b h n C D"],
    *decays: Float[Tensor, "b h n C _"],
) -> tuple[Float[Tensor, "b H L E"], Float[Tensor, "b h R F E"]]:
    """num beside den (E = D + 1: den is the num of a value that is always 1 and does not decay), and the next S.

    `names` say which of the log decays these are. Axes: n chunks of C slots, g = H / h query heads per key head, R
    registers.
    """
    (heads, n, chunk), (registers, features) = k.shape[1:4], S.shape[2:4]
    of_axes = dict(zip(names, decays, strict=True))
    log_decay_k, log_decay_v = of_axes.get("log_decay_k"), of_axes.get("log_decay_v")
    q = q.unflatten(2, (n, chunk)).unflatten(1, (heads, -1)).movedim(2, 4) * masks.query[..., None]
    v = torch.nn.functional.pad(v, (0, 1), value=1)
    scores, q, k, kept = decayed_scores(q, k * masks.key, log_decay_k)
    scores, kept = scores * masks.near[:, :, :, :, None], (kept * masks.keeps)[..., None]
    if log_decay_v is None:
        near, into = (scores.flatten(3, 4) @ v).unflatten(3, (chunk, -1)), None
    else:
        near, into, v, kept_v = decayed_sums(scores, v, torch.nn.functional.pad(log_decay_v, (0, 1)))
        kept = kept * kept_v[..., None, :]

    entering = (k[..., None, :] * masks.enters[..., None]).flatten(4)
    added, states = (entering.mT @ v).unflatten(3, (registers, features)), []
    for c in range(n):
        states.append(S)
        if masks.catches_up is not None:
            S = torch.where(masks.catches_up[:, :, c, None, None, None], S[:, :, :1], S)
        S = torch.addcmul(added[:, :, c], S, kept[:, :, c, None])
    reading = (q[..., None, :] * masks.reads[:, :, :, :, None, :, None]).flatten(5).flatten(3, 4)
    far = (reading @ torch.stack(states, dim=2).flatten(3, 4)).unflatten(3, (chunk, -1))
    out = near + (far if into is None else far * into[..., None, :])
    return out.movedim(4, 2).flatten(3, 4).flatten(1, 2), S
