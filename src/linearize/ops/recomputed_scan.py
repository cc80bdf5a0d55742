"""The engine for everything that goes chunk by chunk: blocks of a grid in turn, in memory linear in the sequence.

A checkpointed recurrence: forward keeps the inputs and the state before each segment of chunks; backward goes from the
last block to the first and computes each again. What happens within a block is its `Body`. There are three: softmax in
the window, the linear part with at most one decay per head (`chunked`), and what is left to autograd
(`chunk_recurrence`: vector decays, the delta rule). The linear part has one of its own, with a backward written out,
because it is what most recipes run, and as a `chunk_recurrence` takes so many times as long (8 heads, D = F = 64, one
CPU thread, medians of 15 rounds in turns):

    at 1,024 and 4,096 tokens      forward        forward and backward
    no decay                       1.35, 1.43     1.43, 1.59
    one decay per head             1.70, 2.17     1.94, 2.36

Stripped of all masks, and for no decay alone, autograd's backward still takes 1.4 to 1.6 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops.grid import Block, Grid

Tensors = Sequence[Tensor]
Grads = Sequence[Tensor | None]


class Given(NamedTuple):
    """The arguments of a body for one block: `state` before it, [b, h, ...] each; whole inputs, [B, H or Hk, P, X]."""

    block: Block
    state: Tensors
    inputs: Tensors


class Body(ABC):
    """The computation of a scan within a block."""

    grid: Grid

    @abstractmethod
    def masks(self, batch: slice, start: int, stop: int) -> Any:
        """Return what the heads of a block share, the block's `masks`."""

    @abstractmethod
    def forward(self, given: Given, outputs: Tensors) -> Tensors:
        """Write the outputs of the block's queries; return the state after the block."""

    @abstractmethod
    def backward(self, given: Given, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        """The gradient of the state before the block, given that of the state after it.

        `grads` are those of the inputs, None where not wanted: to be written for the first input, that of the queries,
        and added to for all others.
        """


def scan(body: Body, widths: Sequence[int], state: Tensors, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Outputs [B, H, P, width] of as many heads and slots as the first input; `state` stands before the first slot."""
    return _Scan.apply(body, widths, len(state), *state, *inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Body, widths: Sequence[int], num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        state, inputs = tensors[:num_states], tensors[num_states:]
        outputs = tuple(inputs[0].new_empty(*inputs[0].shape[:3], width) for width in widths)
        # The states before all segments, which backward needs, or before the next.
        kept = body.grid.num_segments if any(ctx.needs_input_grad) else 0
        states = tuple(x.new_empty(kept + 1, *x.shape) for x in state)
        for x, first in zip(states, state, strict=True):
            x[0] = first
        for block in body.grid.blocks(body.masks):
            before, after = (block.segment, block.segment + 1) if kept else (0, 0)
            given = Given(block, [x[before][block.rows] for x in states], inputs)
            for x, y in zip(states, body.forward(given, outputs), strict=True):
                x[after][block.rows] = y
        ctx.save_for_backward(*states, *inputs)
        ctx.body, ctx.num_states = body, num_states
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        body: Body = ctx.body
        saved = ctx.saved_tensors  # once: gradient checkpointing makes them again for each time they are asked for
        states, inputs = saved[: ctx.num_states], saved[ctx.num_states :]
        wanted = ctx.needs_input_grad[3 + ctx.num_states :]
        new = (torch.empty_like, *(torch.zeros_like for _ in inputs[1:]))
        grads = [make(x) if want else None for make, x, want in zip(new, inputs, wanted, strict=True)]
        grad_state = [torch.zeros_like(x[0]) for x in states]
        for block in body.grid.blocks(body.masks, reverse=True):
            given = Given(block, [x[block.segment][block.rows] for x in states], inputs)
            found = body.backward(given, [x[block.rows] for x in grad_state], grad_outputs, grads)
            for x, g in zip(grad_state, found, strict=True):
                x[block.rows] = g
        return None, None, None, *grad_state, *grads
