"""Log decays of the linear state's steps: which of them tick, and their sums."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.ops.layout import Layout
from linearize.ops.span import Span


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
    log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: Layout, until: Bool[Tensor, "#B K"]
) -> tuple[Float[Tensor, "B Hk K X"], Float[Tensor, "B Hk 1 X"]]:
    """Sums of the log decays of the steps `until` after each slot, and of all of them, in float64."""
    steps = torch.where(until[:, None, :, None], ticking(log_decay, span, layout).double(), 0)
    total = steps.sum(2, keepdim=True)
    return total - steps.cumsum(2), total
