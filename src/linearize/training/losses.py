"""Losses on the model's outputs, by chunks of tokens: no fp32 copy of all logits, forward or backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.configs.training import LossConfig

CHUNK_ELEMENTS = 2**24  # logits in fp32 at a time: 64 MiB


def output_losses(
    outputs: Float[Tensor, "N C"],
    teacher: Float[Tensor, "N C"] | None,
    targets: Int[Tensor, " N"] | Float[Tensor, " N"] | None,
    config: LossConfig,
) -> Float[Tensor, ""]:
    """Return the weighted sum of the losses, summed over N outputs, in fp32 (fp64 for fp64 outputs).

    Args:
        outputs, teacher: logits of C tokens or classes, one number (C = 1), or hidden states, of student and teacher.
        targets: classes, or numbers; None: `config.labels` is 0.
    """
    total = outputs.new_zeros((), dtype=torch.promote_types(torch.float32, outputs.dtype))
    chunk = max(1, CHUNK_ELEMENTS // outputs.shape[-1])
    for start in range(0, max(1, len(outputs)), chunk):  # also without outputs: a loss of 0 with a graph
        rows = slice(start, start + chunk)
        arguments = *(None if x is None else x[rows] for x in (outputs, teacher, targets)), config
        if torch.is_grad_enabled() and len(outputs) > chunk:
            total = total + checkpoint(_chunk_loss, *arguments, use_reentrant=False)
        else:
            total = total + _chunk_loss(*arguments)  # type: ignore[arg-type]
    return total


def _chunk_loss(
    outputs: Float[Tensor, "N C"],
    teacher: Float[Tensor, "N C"] | None,
    targets: Int[Tensor, " N"] | Float[Tensor, " N"] | None,
    config: LossConfig,
) -> Float[Tensor, ""]:
    outputs = outputs.to(torch.promote_types(torch.float32, outputs.dtype))
    loss = outputs[:0].sum()  # 0, with a graph
    if config.labels:
        assert targets is not None
        loss = loss + config.labels * _label_loss(outputs, targets)
    if teacher is None:
        return loss
    teacher = teacher.to(outputs.dtype)
    if config.output_mse:
        loss = loss + config.output_mse * (outputs - teacher).square().mean(-1).sum()
    if config.kl:
        log_q, log_p = (F.log_softmax(x, dim=-1) for x in (outputs, teacher))
        if config.top_k is not None and config.top_k < log_p.shape[-1] - 1:
            chosen = log_p.topk(config.top_k, dim=-1).indices
            log_p, log_q = _compressed(log_p, chosen), _compressed(log_q, chosen)
        loss = loss + config.kl * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return loss


def _label_loss(outputs: Float[Tensor, "N C"], targets: Tensor) -> Float[Tensor, ""]:
    """Return the cross-entropy of classes, or the squared error of numbers."""
    if targets.is_floating_point():
        return (outputs[:, 0] - targets.to(outputs.dtype)).square().sum()
    return F.cross_entropy(outputs, targets, reduction="sum")


def _compressed(log_p: Float[Tensor, "N V"], chosen: Int[Tensor, "N k"]) -> Float[Tensor, "N k1"]:
    """Return log probabilities of the chosen tokens, and of all others together as one more (k1 = k + 1)."""
    rest = log_p.scatter(-1, chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, chosen), rest], dim=-1)
