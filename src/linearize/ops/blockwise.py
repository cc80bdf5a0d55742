"""Run a function over a sequence block by block, forward and backward, in memory that is linear in the sequence.

Only inputs and the state carried between blocks are kept; the backward pass recomputes each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# block(start, stop, carry, inputs) -> (outputs for slots start..stop, carry)
Block = Callable[[int, int, Sequence[Tensor], Sequence[Tensor]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def blockwise(
    block: Block, inputs: Sequence[Tensor], reaches: Sequence[int], carry: Sequence[Tensor], block_size: int
) -> tuple[Tensor, ...]:
    """Concatenated outputs of `block` over all slots (axis 2 of every input and output).

    Args:
        inputs: tensors with axis 2 of one common length, a multiple of nothing in particular.
        reaches: for each input, how many slots before `start` the block reads as well; there are fewer at the start of
            the sequence.
        carry: tensors handed from block to block.
        block_size: slots per block; the last block may be shorter.
    """
    return _Blockwise.apply(block, tuple(reaches), block_size, len(carry), *carry, *inputs)  # type: ignore[no-any-return]


def _bounds(length: int, block_size: int) -> list[tuple[int, int]]:
    return [(start, min(start + block_size, length)) for start in range(0, length, block_size)]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Block, reaches: tuple[int, ...], block_size: int, n_carry: int, *tensors: Tensor):
        carry, inputs = tensors[:n_carry], tensors[n_carry:]
        bounds = _bounds(inputs[0].shape[2], block_size)
        outputs: list[Tensor] = []
        carries: list[Tensor] = []
        for start, stop in bounds:
            carries += carry
            slices = [x[:, :, max(0, start - reach) : stop] for x, reach in zip(inputs, reaches, strict=True)]
            parts, carry = block(start, stop, carry, slices)
            if not outputs:
                length = inputs[0].shape[2]
                outputs = [part.new_empty(*part.shape[:2], length, *part.shape[3:]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[:, :, start:stop] = part
        ctx.block, ctx.reaches, ctx.bounds, ctx.n_carry = block, reaches, bounds, n_carry
        ctx.save_for_backward(*inputs, *carries)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        n_inputs = len(ctx.reaches)
        saved = ctx.saved_tensors
        inputs, carries = saved[:n_inputs], saved[n_inputs:]
        needs = ctx.needs_input_grad[4 + ctx.n_carry :]
        grads = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)]
        grad_carry: list[Tensor | None] = [None] * ctx.n_carry
        for index in reversed(range(len(ctx.bounds))):
            start, stop = ctx.bounds[index]
            windows = [slice(max(0, start - reach), stop) for reach in ctx.reaches]
            with torch.enable_grad():
                slices = [
                    x[:, :, window].detach().requires_grad_(need)
                    for x, window, need in zip(inputs, windows, needs, strict=True)
                ]
                carry = [x.detach().requires_grad_() for x in carries[index * ctx.n_carry : (index + 1) * ctx.n_carry]]
                parts, after = ctx.block(start, stop, carry, slices)
            pairs = list(zip(parts, (g[:, :, start:stop] for g in grad_outputs), strict=True))
            pairs += [(x, g) for x, g in zip(after, grad_carry, strict=True) if g is not None]
            pairs = [(x, g) for x, g in pairs if x.requires_grad]
            if not pairs:
                continue
            values, value_grads = zip(*pairs, strict=True)
            wanted = [x for x in slices if x.requires_grad] + carry
            found = iter(torch.autograd.grad(values, wanted, value_grads, allow_unused=True))
            for grad, window, x in zip(grads, windows, slices, strict=True):
                if x.requires_grad and grad is not None and (g := next(found)) is not None:
                    grad[:, :, window] += g
            grad_carry = list(found)
        return (None, None, None, None, *grad_carry, *grads)
