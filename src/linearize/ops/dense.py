"""Compute rows of few keys by one masked matrix of all scores, which is less work than chunks for short rows.

The number of scores is bounded, so memory is still linear in the inputs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from linearize.configs.spans import Span
from linearize.ops.chunk_recurrence import delta_values, vector_decay_scan
from linearize.ops.decays import cumulative
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import LOG2_E, Partial, accumulation_dtype, in_dtype
from linearize.ops.reference import visible_keys

__all__ = ["delta_values", "is_short", "linear_scan", "window_softmax"]

MOST_KEYS = 256
MOST_SCORES = 2**22  # over all rows and heads


def is_short(queries: torch.Size, keys: int) -> bool:
    """Return whether rows of `keys` keys, for queries of shape [B, H, T, X], are short enough for this module."""
    return keys <= MOST_KEYS and queries[:3].numel() * keys <= MOST_SCORES


def linear_scan(x: LinearInputs) -> Partial:
    """Return the linear part (`reference.linear_scan`); vector decays are computed by chunks."""
    if x.vector_decays:
        return vector_decay_scan(x)
    span, layout, kernel, state = x.span, x.layout, x.kernel, x.state
    dtype, (batch, heads, length, _), key_heads = accumulation_dtype(x.v.dtype), x.queries().shape, x.phi_k.shape[1]
    phi_q, phi_k, v = (in_dtype(tensor, dtype) for tensor in (x.queries(), x.phi_k, x.v))
    first, keys = 0, v.shape[2]
    if layout.uniform and state is None:  # no linear keys below the first windows, nor in the last window
        first, keys = min(span.max_softmax_keys, length), max(0, keys - span.linear_delay)
    visible = layout.once(("linear", span, dtype), lambda: visible_keys(span, layout)[1][:, None].to(dtype))
    visible = visible[:, :, first:, :keys]
    weights = _grouped(phi_q[:, :, first:], key_heads) @ phi_k[:, :, :keys].mT
    weights = (weights if kernel is None else kernel.scores(weights)).view(batch, heads, length - first, keys)
    sums = None
    if x.log_decay_k is not None:
        sums = repeat_kv(cumulative(x.log_decay_k, span, layout), heads)
        decay = sums[:, :, sums.shape[2] - length + first :] - sums[:, :, :keys].mT
        visible = decay.masked_fill(visible == 0, -torch.inf).exp().to(dtype)
    weights = weights * visible if weights.requires_grad or visible.requires_grad else weights.mul_(visible)
    num, den = _grouped(weights, v.shape[1]) @ v[:, :, :keys], weights.sum(-1)
    num, den = pad(num.view(batch, heads, length - first, v.shape[3]), (0, 0, first, 0)), pad(den, (first, 0))
    if state is not None:
        carried = ((layout.query_document == 0) & (layout.query_position >= 0))[:, None, :, None]
        read = (phi_q if kernel is None else kernel.features(phi_q)) * carried
        if sums is not None:
            read = read * sums[:, :, -length:].exp().to(dtype)
        read = _grouped(read, state.z.shape[1])
        num = num + (read @ state.S.to(dtype)).view(num.shape)
        den = den + (read @ state.z[..., None].to(dtype)).view(den.shape)
    return Partial(num, den, torch.zeros_like(den))


def window_softmax(x: SoftmaxInputs) -> Partial:
    """Return the softmax part (`reference.window_softmax`)."""
    span, layout, scaling, softcap = x.span, x.layout, x.scaling, x.softcap
    dtype, (batch, heads, length, _), groups = accumulation_dtype(x.v.dtype), x.q.shape, x.k.shape[1]
    q, k, v = (in_dtype(tensor, dtype) for tensor in (x.q, x.k, x.v))
    # On a CPU, exp2 takes a quarter of the time of exp, and exp(-inf) is slower than other exponentials.
    factor = scaling * LOG2_E if softcap is None else scaling / softcap
    scores = (_grouped(q * factor, groups) @ k.mT).view(batch, heads, length, k.shape[2])
    scores = scores if softcap is None else softcap * LOG2_E * torch.tanh(scores)
    alone, bias = scores.requires_grad, layout.once(("softmax", span, dtype), lambda: _no_scores(span, layout, dtype))
    scores = scores + bias if alone else scores.add_(bias)
    top = scores.amax(-1, keepdim=True)
    # A query sees its own key, unless it is padding or there is no window.
    if not (layout.uniform and span.max_softmax_keys):
        top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp2() if alone else scores.sub_(top).exp2_()
    num = (_grouped(weights, groups) @ v).view(batch, heads, length, v.shape[3])
    return Partial(num, weights.sum(-1), top.squeeze(-1) / LOG2_E)


def _no_scores(span: Span, layout: SequenceLayout, dtype: torch.dtype) -> Float[Tensor, "B 1 T K"]:
    """Return a bias that hides keys from softmax: 0, or -inf."""
    seen = visible_keys(span, layout)[0][:, None]
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _grouped(x: Float[Tensor, "B H T X"], heads: int) -> Float[Tensor, "B h N X"]:
    """Concatenate the rows of heads that share one of `heads` other heads."""
    return x.reshape(len(x), heads, x.shape[1] // heads * x.shape[2], x.shape[3])
