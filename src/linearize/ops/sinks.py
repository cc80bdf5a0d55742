"""The softmax over a document's first keys, which every later query sees, and the merging of two softmax parts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.ops.partial import Partial
from linearize.ops.slots import Slots
from linearize.ops.span import Span


def sink_softmax(
    q: Float[Tensor, "B H P D"],
    k: Float[Tensor, "B G P D"],
    v: Float[Tensor, "B G P D"],
    *,
    slots: Slots,
    span: Span,
    scaling: float,
    softcap: float | None,
) -> Partial:
    """The softmax part over those sinks of each query's document that lie below its window; P ordered slots."""
    sink = torch.arange(span.sinks, device=q.device)
    position = slots.position[:, :, None]
    slot = torch.arange(position.shape[1], device=q.device)[None, :, None] - position + sink
    if slots.layout.sink_slots:
        moved = (slots.position[:, None, : span.sinks] == sink) & (slots.document == 0)[:, :, None]
        slot = torch.where(moved, sink, slot)
    seen = (position >= 0) & (sink < span.lo(position)) & (sink <= position)
    slot = torch.where(seen, slot, 0)

    def take(x: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G 1 P s D"]:
        index = slot.flatten(1)[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3])
        return x.gather(2, index).unflatten(2, (-1, span.sinks))[:, :, None]

    scores = (q.unflatten(1, (k.shape[1], -1))[..., None, :] * scaling * take(k)).sum(-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(scores - top)
    num = (weights[..., None] * take(v)).sum(-2)
    return Partial(*(x.flatten(1, 2) for x in (num, weights.sum(-1), top.squeeze(-1))))


def merge(one: Partial, other: Partial) -> Partial:
    """The softmax part over the keys of both, on the larger of their two scales."""
    scales = [part.log_scale.masked_fill(part.den == 0, -torch.inf) for part in (one, other)]
    top = torch.maximum(*scales)
    top = torch.where(top == -torch.inf, 0, top)
    weights = [torch.exp(scale - top) for scale in scales]
    num = weights[0][..., None] * one.num + weights[1][..., None] * other.num
    return Partial(num, weights[0] * one.den + weights[1] * other.den, top)
