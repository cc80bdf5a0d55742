"""What attention the pairs of a window and of an exact cache receive, summed over queries: H2O's sums, SnapKV's window.

A pair's sum is that of its softmax weights, over all query heads of its KV head and all queries that could read it:
over window, sinks and cache together, as they were read. Axes: those of `exact_cache`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.ops.exact_cache import Blocks
from linearize.ops.layout import Layout, TerracedSpan
from linearize.ops.partial import accumulation_dtype


@torch.no_grad()
def received(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G M D"],
    seen: Bool[Tensor, "#B #G T M"],
    *,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "B G M"]:
    """The softmax weights of each key, summed over the queries and the query heads of its KV head.

    A query that sees nothing is padding and gives nothing.
    """
    queries = q.to(k.dtype).unflatten(1, (k.shape[1], -1)) * scaling  # [B, G, r, T, D]
    scores = queries @ k[:, :, None].mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
    return weights.masked_fill(~seen[:, :, None], 0).sum((2, 3))


class Attention:
    """The sums of a pool's slots, kept up to date block by block: what the choice of the cache goes by.

    Attributes:
        sums: [B, G, P]; of the slots of the pool, what they have received so far.
    """

    def __init__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G P D"],
        sums: Float[Tensor, "B G P"],
        blocks: Blocks,
        *,
        layout: Layout,
        span: TerracedSpan,
        size: int,
        keeps: float,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """`keeps`: what the sums are multiplied by whenever a block of queries begins."""
        self.q, self.k, self.sums = q, k.to(accumulation_dtype(k.dtype)), sums
        self.blocks, self.layout, self.span, self.size, self.keeps = blocks, layout, span, size, keeps
        self.options = {"scaling": scaling, "softcap": softcap}
        self.sinks = self._carried_sinks()

    def received(self, candidates: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
        """What these candidates have received."""
        return self.sums.gather(2, candidates.clamp_min(0))

    def read(self, index: int, held: Int[Tensor, "B G C"]) -> None:
        """Let the queries of a block read what its cache holds, its window and the sinks."""
        blocks, layout, span, batch = self.blocks, self.layout, self.span, len(self.q)
        own = blocks.slots[:, index]
        self._add_sinks(index)
        before = max(0, index - span.blocks + 1)
        near = torch.cat([blocks.slots[:, before : index + 1].flatten(1), self.sinks], dim=1)
        position, document = (
            torch.where(near >= 0, _at(x, near), -1) for x in (layout.key_position, layout.key_document)
        )
        query = torch.where(own >= 0, _at(layout.key_position, own), -1)
        first = own.amax(1, keepdim=True)  # a slot of the block
        lowest = span.lo(_at(layout.key_position, first))
        window = torch.arange(near.shape[1], device=near.device) < near.shape[1] - self.sinks.shape[1]
        there = (position >= 0) & (document == _at(layout.key_document, first)) & (window == (position >= lowest))
        asks = own - (layout.key_position.shape[1] - layout.length)  # which query each slot has, if any
        seen = there[:, None] & (position[:, None] <= query[:, :, None])
        seen = torch.cat(
            [
                (held >= 0)[:, :, None].expand(-1, -1, own.shape[1], -1),
                seen[:, None].expand(batch, held.shape[1], -1, -1),
            ],
            dim=3,
        )
        seen = seen & ((own >= 0) & (asks >= 0))[:, None, :, None]
        near = torch.where(near >= 0, near + self.size, -1)[:, None].expand(batch, held.shape[1], -1)
        places = torch.cat([held, near], dim=2)
        q = self.q.take_along_dim(asks.clamp_min(0)[:, None, :, None], 2)
        more = received(q, self.k.take_along_dim(places.clamp_min(0)[..., None], 2), seen, **self.options)
        kept = torch.where(blocks.begins[:, index], self.keeps, 1.0).to(self.sums.dtype)
        self.sums = (self.sums * kept[:, None, None]).scatter_add(2, places.clamp_min(0), more.to(self.sums.dtype))

    def _carried_sinks(self) -> Int[Tensor, "B s"]:
        """Slots of a carried document's sinks, where these have left the others behind them; -1: none."""
        sinks, count = self.layout.sink_slots, self.span.sinks
        slots = torch.arange(count, device=self.k.device).expand(len(self.layout.key_position), -1)
        there = self.layout.key_position[:, :count] >= 0
        return torch.where(there, slots, -1) if sinks else torch.full_like(slots, -1)

    def _add_sinks(self, index: int) -> None:
        """Those that are in this block."""
        own = self.blocks.slots[:, index]
        self.sinks = torch.where(self.blocks.fresh[:, index, None], -1, self.sinks)
        at = torch.where(own >= 0, _at(self.layout.key_position, own), -1)
        its = at[:, None] == torch.arange(self.span.sinks, device=at.device)[:, None]
        self.sinks = torch.where(its.any(2), _at(own, its.to(torch.uint8).argmax(2)), self.sinks)


def _at(x: Int[Tensor, "b K"], slots: Int[Tensor, "b N"]) -> Int[Tensor, "b N"]:
    """x in these slots; those that are -1 have that of the first one."""
    return x.gather(1, slots.clamp_min(0))
