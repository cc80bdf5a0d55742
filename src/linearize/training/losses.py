"""Losses on the model's outputs, by chunks of tokens: no fp32 copy of all logits, forward or backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.stages import LossConfig

CHUNK_ELEMENTS = 2**24  # of logits in fp32 at a time: 64 MiB


def output_losses(
    logits: Float[Tensor, "B L V"],
    teacher: Float[Tensor, "B L V"] | None,
    labels: Int[Tensor, "B L"],
    config: LossConfig,
) -> Float[Tensor, ""]:
    """The weighted sum of the losses, summed over the labels; logits at t - 1 are compared with the label at t.

    Labels of -100 are left out. In fp32 (fp64 for fp64 logits).
    """
    kept = labels[:, 1:] != -100
    student, targets = logits[:, :-1][kept], labels[:, 1:][kept]
    expected = None if teacher is None else teacher[:, :-1][kept]
    total = logits.new_zeros((), dtype=torch.promote_types(torch.float32, logits.dtype))
    chunk = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for start in range(0, max(1, len(targets)), chunk):  # once for no labels: a loss of 0 that has a graph
        rows = slice(start, start + chunk)
        arguments = student[rows], None if expected is None else expected[rows], targets[rows], config
        if torch.is_grad_enabled() and len(targets) > chunk:
            total = total + checkpoint(_chunk_loss, *arguments, use_reentrant=False)
        else:
            total = total + _chunk_loss(*arguments)
    return total


def _chunk_loss(
    student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"] | None, labels: Int[Tensor, " N"], config: LossConfig
) -> Float[Tensor, ""]:
    dtype = torch.promote_types(torch.float32, student.dtype)
    log_q = F.log_softmax(student.to(dtype), dim=-1)
    loss = config.next_token * F.nll_loss(log_q, labels, reduction="sum") if config.next_token else log_q.new_zeros(())
    if teacher is not None:
        log_p = F.log_softmax(teacher.to(dtype), dim=-1)
        if config.top_k is not None and config.top_k < log_p.shape[-1] - 1:
            chosen = log_p.topk(config.top_k, dim=-1).indices
            log_p, log_q = _compressed(log_p, chosen), _compressed(log_q, chosen)
        if config.kl:
            loss = loss + config.kl * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        if config.reverse_kl:
            loss = loss + config.reverse_kl * F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    return loss


def _compressed(log_p: Float[Tensor, "N V"], chosen: Int[Tensor, "N k"]) -> Float[Tensor, "N k1"]:
    """The chosen tokens, and the rest of the probability as one more."""
    rest = log_p.scatter(-1, chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, chosen), rest], dim=-1)
