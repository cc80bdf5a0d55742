"""The losses of attention transfer on one layer, on outputs and on attention weights, without a T x T matrix.

Losses on weights are sums over blocks of queries. Each block's gradient with respect to the features, which are
computed once per layer, is taken right after its loss. The backward pass continues from the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.base import UserError
from linearize.configs.training import TransferConfig
from linearize.hf.attention import sliding_window
from linearize.mixers.attention_weights import (
    Features,
    LinearPart,
    QueryBlock,
    block_scores,
    no_distribution,
    query_blocks,
    softmax_weights,
)
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout

MIN_WEIGHT = 1e-20  # the least weight before its logarithm is taken: relu and rounding give weights of 0


def check_losses(config: TransferConfig, name: str, mixer: Any) -> None:
    """Raise UserError if a loss is not defined for a layer's mixer; `name` is that of the layer."""
    if not config.weight_cross_entropy:
        return
    if isinstance(mixer, HeadwiseMixer):
        raise UserError(
            f"transfer: expected output_mse alone for heads of several kinds, as {name} has; set "
            "weight_cross_entropy to 0"
        )
    if mixer.config.cache is not None:
        raise UserError(
            f"transfer: expected only output_mse with a KV cache with eviction, found more for {name}; evictions "
            "decide which keys the linear part reads; set weight_cross_entropy to 0"
        )
    reason = no_distribution(mixer)
    if reason is not None:
        raise UserError(
            "transfer.weight_cross_entropy: expected mixers whose attention weights are a distribution over the keys, "
            f"found {reason}, in {name}; set it to 0 and output_mse above 0"
        )


def transfer_loss(
    layer: Any, inputs: AttnInputs, layout: SequenceLayout | None, target: Tensor, config: TransferConfig, share: float
) -> Float[Tensor, ""]:
    """Return a layer's loss on one micro batch, weighted by its share of the tokens of an optimizer step.

    `output_mse`: of outputs before the output projection, a mean over valid tokens, heads and head dimension (LoLCATs
    eq. 6 for one layer). `weight_cross_entropy`: -sum_j a_nj log w_nj of the softmax weights a and the mixer's w, a
    mean over heads and valid queries (Hedgehog eq. 4; LOLCAT eq. 7; LoLCATs App. A.3).

    Args:
        layer: the converted attention module.
        target: the output of softmax attention, [B, H, T, D].
        share: this micro batch's share of the optimizer step's tokens, without padding.
    """
    mixer, loss = layer.mixer, torch.zeros((), device=target.device)
    if config.output_mse:
        loss = share * config.output_mse * mean_squared_error(mixer(inputs, layout), target, layout)
    if not config.weight_cross_entropy:
        return loss
    with torch.autocast(target.device.type, enabled=False):
        layout = SequenceLayout.full(inputs.q.shape[2], target.device) if layout is None else layout
        part = LinearPart.of(mixer, inputs, layout)
        valid = (layout.query_position >= 0).expand(len(target), -1).sum()
        factor = share / max(1, int(valid)) * config.weight_cross_entropy
        return loss + factor * weight_cross_entropy(part, sliding_window(layer))


def mean_squared_error(
    y: Float[Tensor, "B H T D"], target: Float[Tensor, "B H T D"], layout: SequenceLayout | None = None
) -> Float[Tensor, ""]:
    """Return the mean squared error over valid tokens, in fp32 (fp64 for fp64 outputs): bf16 loses differences."""
    dtype = torch.promote_types(torch.float32, y.dtype)
    y, target = y.to(dtype), target.to(dtype)
    valid = None if layout is None else layout.query_position >= 0
    if valid is None or bool(valid.all()):
        return torch.nn.functional.mse_loss(y, target)
    valid = valid.expand(len(y), -1)
    wrong = (y - target).square().mean((1, 3))
    return wrong.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)


def weight_cross_entropy(part: LinearPart, reach: int | None) -> Float[Tensor, ""]:
    """Return the cross-entropy of the mixer's weights: a sum over queries of the mean over heads.

    Window dropout does not apply: weights of a hidden window would be 0. `reach` as in `query_blocks`.
    """
    combine = dict(part.mixer.combine.named_parameters())

    def loss_of(block: QueryBlock, features: Features, parameters: list[Tensor]) -> Tensor:
        scores, linear = block_scores(part.inputs, block), part.partial(features, block.far)
        student = part.combined(block, scores, features, linear, dict(zip(combine, parameters, strict=True)))
        return cross_entropy(softmax_weights(scores, block.visible), student) / scores.shape[1]

    blocks = query_blocks(part.mixer, part.layout, len(part.phi_q), reach)
    return _SumOverBlocks.apply(loss_of, blocks, *part.features(), *combine.values())


def cross_entropy(softmax: Float[Tensor, "B H C K"], student: Float[Tensor, "B H C K"]) -> Float[Tensor, ""]:
    """Return the sum over all queries of -sum_j a_j log w_j, with weights w clamped to at least 1e-20.

    Weights of a query that sum to more than 1 (combine `add`) are divided by their sum, so that the minimum is the
    entropy of a. Weights that sum to less than 1 are not, so that the missing weight increases the loss.
    """
    mass = student.sum(-1).clamp_min(1).log()
    return (softmax.sum(-1) * mass).sum() - (softmax * student.clamp_min(MIN_WEIGHT).log()).sum()


class _SumOverBlocks(torch.autograd.Function):
    """Sum `loss_of(block, features, parameters)` and its gradient over blocks, with one block's graph at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[QueryBlock, Features, list[Tensor]], Tensor],
        blocks: Iterable[QueryBlock],
        *tensors: Tensor | None,
    ) -> Tensor:
        """Return the sum; `tensors` are the features of all tokens, then the parameters."""
        needed = ctx.needs_input_grad[2:]
        gradients: list[Any] = [None] * len(tensors)
        losses = []
        for block in blocks:
            places: list[Any] = [(..., slots, slice(None)) for slots in (block.queries, block.keys, block.keys)]
            places += [(..., block.queries)] + [...] * (len(tensors) - 4)
            parts: list[Any] = [
                None if x is None else x[place].detach().requires_grad_(need)
                for x, place, need in zip(tensors, places, needed, strict=True)
            ]
            with torch.enable_grad():
                loss = loss_of(block, Features(*parts[:4]), parts[4:])
            losses.append(loss.detach())
            # Without a window, and with a map without parameters, the loss is constant.
            wanted = [index for index, need in enumerate(needed) if need and loss.requires_grad]
            found = torch.autograd.grad(loss, [parts[i] for i in wanted], allow_unused=True) if wanted else ()
            for index, gradient in zip(wanted, found, strict=True):
                if gradient is not None and gradients[index] is None:
                    gradients[index] = torch.zeros_like(tensors[index])  # type: ignore[arg-type]
                if gradient is not None:
                    gradients[index][places[index]] += gradient
        ctx.save_for_backward(*gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, *(None if x is None else x * gradient for x in ctx.saved_tensors)
