"""The running maximum that keeps exponential key maps from overflowing (ReGLA eq. 12, made causal).

A key's features are exp(e - m) with m the maximum of the logarithms e over features and over the document so far. When
m grows, earlier keys are rescaled by a decay exp(m_{t-1} - m_t) of the step, which the ops apply like any other decay.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.ops.layout import SequenceLayout


def running_maximum(
    top: Float[Tensor, "B Hk T"], layout: SequenceLayout, before: Float[Tensor, "B Hk"] | None
) -> tuple[Float[Tensor, "B Hk T"], Float[Tensor, "B Hk T"], Float[Tensor, "B Hk"]]:
    """Return (m_t, the log decay m_{t-1} - m_t, m after the last token) of each row's documents; differentiable.

    Args:
        top: the greatest logarithm of each token's key.
        layout: of these tokens alone, without context.
        before: m of the carried document, which document 0 continues; -inf before its first token.
    """
    if before is None:
        before = top.new_full(top.shape[:2], -torch.inf)
    before = before.to(top.dtype)
    if layout.uniform:
        m = torch.cat([before[..., None], top], dim=2).cummax(2).values
        # The copy lets the memory of the whole m be freed.
        return _finite(m[..., 1:]), _steps(m[..., :-1], m[..., 1:]), m[..., -1].clone()
    valid, document = (layout.key_position >= 0)[:, None], layout.key_document[:, None].expand(len(top), -1, -1)
    top = top.masked_fill(~valid, -torch.inf)
    top = torch.cat([before[..., None], top], dim=2)
    document = torch.cat([torch.zeros_like(document[..., :1]), document], dim=2)
    m = top.gather(2, _last_greatest(top, document))
    m = torch.where(_of_document(m, top, document), m, -torch.inf)
    same = document[..., 1:] == document[..., :-1]
    log_decay = _steps(m[..., :-1].masked_fill(~same, -torch.inf), m[..., 1:])
    last = m.masked_fill(document != layout.last_document[:, None], -torch.inf).amax(2)
    return _finite(m[..., 1:]), log_decay, last


def _last_greatest(top: Tensor, document: Tensor) -> Tensor:
    """Return the index of the maximum of each token's document so far.

    Documents get offsets that make later ones larger than earlier ones, so that one cummax serves all.
    """
    finite = torch.where(top == -torch.inf, 0, top.detach()).double()
    height = finite.amax() - finite.amin() + 1
    stacked = torch.where(top == -torch.inf, -torch.inf, finite) + document * height
    return stacked.cummax(2).indices


def _of_document(m: Tensor, top: Tensor, document: Tensor) -> Tensor:
    """Return whether a document has a token so far; before, `_last_greatest` is an index of an earlier document."""
    seen = torch.where(top == -torch.inf, -1, document).cummax(2).values
    return (seen == document) & (m > -torch.inf)


def _steps(earlier: Tensor, later: Tensor) -> Tensor:
    """Return m_{t-1} - m_t, never positive, and 0 where there is no m_{t-1}."""
    there = earlier > -torch.inf
    return torch.where(there, torch.where(there, earlier, 0) - _finite(later), 0).clamp_max(0)


def _finite(m: Tensor) -> Tensor:
    return torch.where(m == -torch.inf, 0, m)
