"""Compute with log decays: the steps that decay, their sums, and products of queries and keys with decays.

The factors of a product are e^{G_n - G_j} for all j < n, where G sums the log decays. e^{G_n} and e^{-G_j} cannot be
formed apart: one vanishes where the other overflows. So a chunk is chunked again (secondary chunking, as in GLA,
arXiv:2312.06635), by halves: for j in the first half of a sub-chunk and n in its second half, e^{G_n - G_mid} and
e^{G_mid - G_j} are both at most 1, and the pairs within a half are those of shorter sub-chunks. log2 C levels of matrix
products hold every pair once. Log decays are only ever added, never subtracted, so that nothing cancels.

Axes of products: N chunks of all rows; C slots of a chunk, a power of 2; g query heads; S sub-chunks; X is F or 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.configs.spans import Span
from linearize.ops.layout import SequenceLayout


def masked_log_decay(
    log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: SequenceLayout
) -> Float[Tensor, "B Hk K X"]:
    """Return the log decays, 0 in slots without a key and in slots of sinks, before the first linear key."""
    decays = layout.key_position >= span.sinks
    if layout.uniform and not span.sinks:
        return log_decay
    return torch.where(decays[:, None, :, None], log_decay, 0)


def cumulative(log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: SequenceLayout) -> Float[Tensor, "B Hk K X"]:
    """Return G_n, the sum of the log decays of slots 0..n, in float64: differences of large sums need it."""
    return masked_log_decay(log_decay, span, layout).double().cumsum(2)


def remaining(
    log_decay: Float[Tensor, "#B Hk K X"], span: Span, layout: SequenceLayout, until: Bool[Tensor, "#B K"] | None
) -> tuple[Float[Tensor, "B Hk K X"], Float[Tensor, "B Hk 1 X"]]:
    """Return sums of the log decays of the steps `until` after each slot, and of all these steps, in float64.

    `until` None: all steps decay.
    """
    steps = log_decay.double()
    if until is not None:
        steps = torch.where(until[:, None, :, None], masked_log_decay(log_decay, span, layout).double(), 0)
    total = steps.sum(2, keepdim=True)
    return total - steps.cumsum(2), total


# --- products within a chunk ------------------------------------------------------------------------------------------


def decayed_scores(
    q: Float[Tensor, "*r C g F"], k: Float[Tensor, "*r C F"], log_decay: Float[Tensor, "*r C X"] | None
) -> tuple[Float[Tensor, "*r C g C"], Float[Tensor, "*r C g F"], Float[Tensor, "*r C F"], Tensor]:
    """Return scores sum_f q_nf e^{G_nf - G_jf} k_jf of the keys j <= n of each chunk, and factors for other chunks.

    These are: q times the decay from before the chunk to its slot n, step n included; k times the decay from its slot
    j, step j left out, to the end of the chunk; the decay through the whole chunk.
    """
    if log_decay is None:
        causal = torch.ones(k.shape[-2], k.shape[-2], dtype=k.dtype, device=k.device).tril_()[:, None]
        scores = (q.flatten(-3, -2) @ k.mT).unflatten(-2, q.shape[-3:-1]) * causal
        return scores, q, k, k.new_ones(())
    rows = k.shape[:-2]
    found = _DecayedScores.apply(q.flatten(0, -4), k.flatten(0, -3), log_decay.flatten(0, -3))
    scores, q, k, total = (x.unflatten(0, rows) for x in found)
    return scores, q, k, total


def decayed_sums(
    scores: Float[Tensor, "*r C g C"], v: Float[Tensor, "*r C D"], log_decay: Float[Tensor, "*r C D"]
) -> tuple[Float[Tensor, "*r C g D"], Float[Tensor, "*r C D"], Float[Tensor, "*r C D"], Float[Tensor, "*r D"]]:
    """Return sums over the j <= n of each chunk of scores_nj e^{G_n - G_j} v_j, and factors for other chunks.

    These are: the decay from before the chunk to its slot n, step n included; v times the decay from its slot j, step j
    left out, to the end of the chunk; the decay through the whole chunk.
    """
    found = _DecayedSums.apply(scores.flatten(0, -4), v.flatten(0, -3), log_decay.flatten(0, -3))
    sums, into, out, total = (x.unflatten(0, v.shape[:-2]) for x in found)
    return sums, into, out, total


def decay_factor(log_decay: Float[Tensor, "*r"]) -> Float[Tensor, "*r"]:
    """Return e^log_decay, and 0 where the product of two such factors could be denormal.

    Such factors are far below rounding. Arithmetic with denormal numbers takes a hundred times longer, and so does an
    exponential that is denormal or underflows.
    """
    smallest = math.sqrt(torch.finfo(log_decay.dtype).tiny)
    return torch.threshold(log_decay.clamp(min=math.log(smallest)).exp(), 1.01 * smallest, 0)


class _Decays:
    """The decay factors of each chunk, from its log decays [N, C, X].

    Attributes:
        levels: for sub-chunks of 2m slots (m = 1, 2, .. C/2), e^{G_n - G_mid} of the slots n in second halves and
            e^{G_mid - G_j} of the slots j in first halves, [N, S, m, X] both.
        into: [N, C, X], from before the chunk to slot n, the step of n included.
        out: [N, C, X], from slot j, the step of j left out, to the end of the chunk.
    """

    def __init__(self, log_decay: Float[Tensor, "N C X"]) -> None:
        since, until = log_decay.clone(), torch.zeros_like(log_decay)
        self.levels = []
        for level in range(log_decay.shape[1].bit_length() - 1):
            (before, after), (waiting, _) = halves(since, 2**level), halves(until, 2**level)
            self.levels.append((2**level, decay_factor(after), decay_factor(waiting)))
            waiting += after[:, :, -1:]
            after += before[:, :, -1:]
        self.into, self.out = decay_factor(since), decay_factor(until)

    def grad_log_decay(self, grad_G: Float[Tensor, "N C X"], grad_end: Float[Tensor, "N X"]) -> Float[Tensor, "N C X"]:
        """Return the gradient of the log decays: step i is in G_n for all n >= i, and in G at the chunk's end."""
        later = torch.ones(grad_G.shape[1], grad_G.shape[1], dtype=grad_G.dtype, device=grad_G.device).triu_()
        return (later @ grad_G).add_(grad_end[:, None])


def halves(x: Float[Tensor, "N C *w"], m: int) -> tuple[Float[Tensor, "N S m *w"], Float[Tensor, "N S m *w"]]:
    """Return the first and second halves (views) of the sub-chunks of 2m slots."""
    x = x.unflatten(1, (-1, 2, m))
    return x[:, :, 0], x[:, :, 1]


def _corners(scores: Float[Tensor, "N C g C"], m: int) -> Float[Tensor, "N S m g m"]:
    """Return a view: of each sub-chunk of 2m slots, the rows of its second half and the columns of its first."""
    subchunks = scores.unflatten(3, (-1, 2, m)).unflatten(1, (-1, 2, m))
    return subchunks[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4).movedim(-1, 1)


def _late(x: Float[Tensor, "N C g X"], since: Float[Tensor, "N S m Y"]) -> Float[Tensor, "N S mg X"]:
    """Return the rows of second halves, times their decay since the middle."""
    return (halves(x, since.shape[2])[1] * since[:, :, :, None]).flatten(2, 3)


def _early(x: Float[Tensor, "N C X"], until: Float[Tensor, "N S m Y"]) -> Float[Tensor, "N S m X"]:
    """Return the rows of first halves, times their decay until the middle."""
    return halves(x, until.shape[2])[0] * until


def _sum_to(x: Float[Tensor, "... F"], width: int) -> Float[Tensor, "... X"]:
    return x if x.shape[-1] == width else x.sum(-1, keepdim=True)


class _DecayedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Float[Tensor, "N C g F"], k: Float[Tensor, "N C F"], log_decay: Float[Tensor, "N C X"]
    ) -> tuple[Tensor, ...]:
        decays, (n, chunk, group, _) = _Decays(log_decay), q.shape
        scores = q.new_zeros(n, chunk, group, chunk)
        scores.diagonal(dim1=1, dim2=3).copy_((q * k[:, :, None]).sum(-1).mT)
        for m, since, until in decays.levels:
            _corners(scores, m).copy_((_late(q, since) @ _early(k, until).mT).unflatten(2, (-1, group)))
        ctx.save_for_backward(q, k, log_decay)
        return scores, q * decays.into[:, :, None], k * decays.out, decays.into[:, -1]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_scores: Tensor, g_into: Tensor, g_out: Tensor, g_total: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, log_decay = ctx.saved_tensors
        decays, group, width = _Decays(log_decay), q.shape[2], log_decay.shape[2]
        grad_q, grad_k = g_into * decays.into[:, :, None], g_out * decays.out
        grad_end = _sum_to((k * grad_k).sum(1), width) + decays.into[:, -1] * g_total
        for m, since, until in decays.levels:
            g, late, early = _corners(g_scores, m).flatten(2, 3), _late(q, since), _early(k, until)
            halves(grad_q, m)[1].addcmul_((g @ early).unflatten(2, (-1, group)), since[:, :, :, None])
            halves(grad_k, m)[0].addcmul_(g.mT @ late, until)
        # G_n appears as q_n e^{G_n} and k_n e^{-G_n} only, but not where a query reads the key of its own slot.
        grad_G = _sum_to((q * grad_q).sum(2) - k * grad_k, width)
        g_own = g_scores.diagonal(dim1=1, dim2=3).mT[..., None]
        grad_q.addcmul_(g_own, k[:, :, None])
        grad_k.add_((g_own * q).sum(2))
        return grad_q, grad_k, decays.grad_log_decay(grad_G, grad_end)


class _DecayedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Float[Tensor, "N C g C"], v: Float[Tensor, "N C D"], log_decay: Float[Tensor, "N C D"]
    ) -> tuple[Tensor, ...]:
        decays, group = _Decays(log_decay), scores.shape[2]
        sums = v.new_zeros(*scores.shape[:3], v.shape[2])
        for m, since, until in decays.levels:
            found = _corners(scores, m).flatten(2, 3) @ _early(v, until)
            halves(sums, m)[1].addcmul_(found.unflatten(2, (-1, group)), since[:, :, :, None])
        ctx.save_for_backward(scores, v, log_decay, sums)
        own = scores.diagonal(dim1=1, dim2=3).mT[..., None] * v[:, :, None]
        return own.add_(sums), decays.into, v * decays.out, decays.into[:, -1]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_sums: Tensor, g_into: Tensor, g_out: Tensor, g_total: Tensor
    ) -> tuple[Tensor, ...]:
        scores, v, log_decay, sums = ctx.saved_tensors
        decays, group = _Decays(log_decay), scores.shape[2]
        grad_scores, grad_v = torch.zeros_like(scores), g_out * decays.out
        grad_end = (v * grad_v).sum(1).addcmul_(decays.into[:, -1], g_total)
        for m, since, until in decays.levels:
            g, early = _late(g_sums, since), _early(v, until)
            _corners(grad_scores, m).copy_((g @ early.mT).unflatten(2, (-1, group)))
            halves(grad_v, m)[0].addcmul_(_corners(scores, m).flatten(2, 3).mT @ g, until)
        grad_G = (sums * g_sums).sum(2).addcmul_(decays.into, g_into).sub_(v * grad_v)
        grad_scores.diagonal(dim1=1, dim2=3).copy_((g_sums * v[:, :, None]).sum(-1).mT)
        grad_v.add_((scores.diagonal(dim1=1, dim2=3).mT[..., None] * g_sums).sum(2))
        return grad_scores, grad_v, decays.grad_log_decay(grad_G, grad_end)
