"""A recurrence from chunk to chunk whose backward is autograd's: for vector decays and the delta rule.

A key stands `span.fold_lag` slots late. That is beside the first query that reads it, or for terraced spans, whose
terraces are read as a whole, less than `window_size` slots before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.configs.spans import Span, TerracedSpan
from linearize.ops.block_sizes import kind
from linearize.ops.grid import ChunkLayout, Grid, pick
from linearize.ops.layout import Layout
from linearize.ops.recomputed_scan import Body, Given, Grads, Tensors

CHUNK = 64
# Scores per block: on a CPU, most of the dozen or two tensors of that size should stay in cache.
BLOCK_SCORES = {"cpu": 2**17, "cuda": 2**23}
# A block has all heads rather than more chunks (heads go side by side, chunks one after the other), but a state is kept
# for each segment.
MIN_CHUNKS_PER_BLOCK = 4


class Masks(NamedTuple):
    """1 (or true) where something counts, 0 elsewhere.

    The state has R registers: one with all keys so far, and for terraced spans a second one with those of them that
    stand before the current terrace, which are the ones that its queries read.
    """

    query: Float[Tensor, "b 1 n C 1"]
    key: Float[Tensor, "b 1 n C 1"]  # there is a linear key, so its step decays too
    near: Float[Tensor, "b 1 n C C"]  # a query reads a key of its chunk, if it is not a later one
    reads: Float[Tensor, "b 1 n C R"]  # a query reads a register as it stands before the chunk
    enters: Float[Tensor, "b 1 n C R"]  # a key enters a register by the end of the chunk
    keeps: Float[Tensor, "b 1 n 1"]  # what the registers hold is kept through the chunk
    catches_up: Bool[Tensor, "b 1 n"] | None  # a terrace begins in the chunk: the second register starts from the first


def power_of_two_chunks(layout: Layout) -> ChunkLayout:
    """Chunks that can be halved, as decay products do."""
    chunk = CHUNK
    while chunk > max(16, layout.key_position.shape[1]):
        chunk //= 2
    return ChunkLayout(layout, chunk)


# (masks, S, queries [b, H, L, X], keys [b, h, n, C, X] of each further input) -> (outputs [b, H, L, width], next S)
Segment = Callable[..., tuple[Tensor, Tensor]]


class ChunkRecurrence(Body):
    """The outputs that `segment` gives for each segment, and the S that the next one begins with."""

    def __init__(self, slots: ChunkLayout, span: Span, q: Tensor, S: Tensor, segment: Segment) -> None:
        group, scores = q.shape[1] // S.shape[1], BLOCK_SCORES[kind(S.device)]
        at_once = scores // (group * slots.chunk**2)
        max_chunks = max(MIN_CHUNKS_PER_BLOCK, at_once // (S.shape[0] * S.shape[1]))
        self.grid = Grid(slots, S.shape[:2], group, at_once, max_chunks, delay=span.fold_lag)
        self.segment, self.sinks, self.dtype, self.terrace = segment, span.sinks, S.dtype, None
        if isinstance(span, TerracedSpan):
            begins = (self.grid.position >= 0) & (self.grid.position % span.window_size == 0)
            self.terrace = F.pad(begins.cumsum(1), (1, 0))

    def masks(self, batch: slice, start: int, stop: int) -> Masks:
        grid = self.grid
        position, document, owner = grid.around(batch, start, stop)
        near = document.queries[..., None] == document.keys[:, :, None]
        reads, enters = document.queries == owner[:, :-1, None], document.keys == owner[:, 1:, None]
        keeps, catches_up = owner[:, :-1] == owner[:, 1:], None
        if self.terrace is None:
            reads, enters = reads[..., None], enters[..., None]
        else:
            terrace = pick(self.terrace, batch)[:, start : stop + 1]
            bounds, terrace = terrace[:, :: grid.chunk], terrace[:, 1:].unflatten(1, (-1, grid.chunk))
            near &= terrace[:, :, None] < terrace[..., None]
            began_before = terrace == bounds[:, :-1, None]
            reads = torch.stack([reads & ~began_before, reads & began_before], dim=-1)
            enters = torch.stack([enters, enters & (terrace < bounds[:, 1:, None])], dim=-1)
            catches_up = (bounds[:, 1:] > bounds[:, :-1])[:, None]
        query, key = position.queries >= 0, position.keys >= self.sinks
        numbers = query[..., None], key[..., None], near, reads, enters, keeps[..., None]
        query, key, near, reads, enters, keeps = (x[:, None].to(self.dtype) for x in numbers)
        return Masks(query, key, near, reads, enters, keeps, catches_up)

    def forward(self, given: Given, outputs: Tensors) -> Tensors:
        y, S = self.segment(given.block.masks, *given.state, *self._of_block(given))
        self.grid.query_rows(outputs[0], given.block).copy_(y)
        return (S,)

    def backward(self, given: Given, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        block, (S, *leaves) = given.block, [x.detach() for x in (*given.state, *self._of_block(given))]
        wanted = [S, *(x for x, grad in zip(leaves, grads, strict=True) if grad is not None)]
        for x in wanted:
            x.requires_grad_()
        with torch.enable_grad():
            outputs = self.segment(given.block.masks, S, *leaves)
        grad_y = self.grid.query_rows(grad_outputs[0], block)
        grad_S, *found = torch.autograd.grad(outputs, wanted, (grad_y, *grad_after))
        if grads[0] is not None:
            self.grid.query_rows(grads[0], block).copy_(found.pop(0))
        for grad, g in zip((x for x in grads[1:] if x is not None), found, strict=True):
            self.grid.add_keys(grad, block, g)
        return (grad_S,)

    def _of_block(self, given: Given) -> list[Tensor]:
        queries, *keys = given.inputs
        return [self.grid.query_rows(queries, given.block), *(self.grid.keys(x, given.block) for x in keys)]
