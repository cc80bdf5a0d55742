"""The losses of attention transfer as the papers write them, on whole T x T matrices; differentiable, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.attention import Documents
from tests.oracles.heads import Inputs, Weights, exponential, present
from tests.oracles.mixer import span_of
from tests.oracles.spans import SpanSpec, span_keys


@dataclass(frozen=True)
class Matrices:
    """Weights [B,H,T,T] and queries [B,T]; rows and columns of padding are 0.

    `student` and `teacher` on all keys.
    """

    student: Tensor
    teacher: Tensor
    valid: Tensor


def matrices(config: Any, w: Weights, inputs: Inputs, documents: Documents, *, reach: int | None = None) -> Matrices:
    """Of a mixer whose linear part has a sum for its normalizer; the teacher's queries see the last `reach` keys."""
    batch, heads, length, _ = inputs.q.shape
    shape = batch, heads, length, length
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in ("student", "teacher")}
    valid = torch.zeros(batch, length, dtype=torch.bool)
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            size = len(slots)
            near, far, seen = masks(span_of(config), size, reach)
            at = torch.tensor(slots)
            for h in range(heads):
                g = h // (heads // inputs.k.shape[1])
                q, k = inputs.q[row, h, at], inputs.k[row, g, at]
                scores = inputs.scaling * q @ k.T
                if inputs.softcap is not None:
                    scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
                hidden = None if inputs.hidden is None else inputs.hidden[row, at]
                weights = _weighing(config, w, h, heads, q, k, hidden)
                parts = {
                    "student": _combined(config, w, h, scores, weights, near, far),
                    "teacher": _softmax(scores, seen),
                }
                for name, matrix in parts.items():
                    found[name] = found[name].index_put(
                        (torch.tensor(row), torch.tensor(h), at[:, None].expand(size, size), at.expand(size, size)),
                        matrix,
                    )
            valid[row, at] = True
    return Matrices(**found, valid=valid)


def cross_entropy(teacher: Tensor, student: Tensor, counted: Tensor) -> Tensor:
    """-sum_j a_nj log w_nj, a mean over the counted queries and heads; weights are at least 1e-20.

    Those of `add` sum to 2 where window and linear part have keys: they are halved.
    """
    student = torch.where(student.sum(-1, keepdim=True) > 1.5, student / 2, student)
    rows = -(teacher * student.clamp_min(1e-20).log()).sum(-1)
    return (rows * counted[:, None]).sum() / (counted.sum() * rows.shape[1])


def mean_squared_error(teacher: Tensor, student: Tensor, v: Tensor, counted: Tensor) -> Tensor:
    """Of the outputs that these weights give, a mean over the counted queries, heads and head dimension."""
    v = v.repeat_interleave(teacher.shape[1] // v.shape[1], dim=1)
    rows = (teacher @ v - student @ v).square().mean(-1)
    return (rows * counted[:, None]).sum() / (counted.sum() * rows.shape[1])


def masks(span: SpanSpec, length: int, reach: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """[T,T]: softmax keys, linear keys, keys of the teacher."""
    near, far, seen = (torch.zeros(length, length, dtype=torch.bool) for _ in range(3))
    for n in range(length):
        softmax, linear = span_keys(span, n)
        near[n, list(softmax)], far[n, list(linear)] = True, True
        seen[n, max(0, n + 1 - (reach or length)) : n + 1] = True
    return near, far, seen


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    weights = torch.zeros_like(scores)
    for n in range(len(scores)):
        if mask[n].any():
            weights[n, mask[n]] = scores[n, mask[n]].softmax(0)
    return weights


def _combined(config: Any, w: Weights, h: int, scores: Tensor, weights: Weighing, near: Tensor, far: Tensor) -> Tensor:
    """The mixer's weights of one head of one document [T,T]."""
    combine = config.combine
    if combine.type == "absolute_scale":
        return _softmax(torch.where(near, scores, weights.logs + present(w.offset)[h]), near | far)
    if combine.type == "shared_denominator" and combine.learned_sink:
        return _with_sink(w, h, scores, weights, near, far)
    if combine.type == "shared_denominator":
        g, top = present(w.window_factor)[h], torch.where(near, scores, -torch.inf).amax(-1, keepdim=True)
        window = scores - top.clamp_min(-1e300)
        if weights.kernel is None:
            return _softmax(torch.where(near, window + g.log(), weights.logs - weights.reference[:, None]), near | far)
        return _over_sum(weights.kernel * far + g * torch.where(near, window.exp(), 0))
    window, alone = _softmax(scores, near), weights.alone(far)
    if combine.type == "add":
        return alone + window
    assert combine.type == "mix"
    s = present(w.window_weight)[h]
    return torch.where(far.any(-1, keepdim=True), s * window + (1 - s) * alone, window)


def _with_sink(w: Weights, h: int, scores: Tensor, weights: Weighing, near: Tensor, far: Tensor) -> Tensor:
    """Those of eq. 7 beside a learned sink, whose weight counts as the first token's [T,T]; features as they are."""
    logit, g = present(w.sink_logit)[h], present(w.window_factor)[h]
    rows = []
    for n in range(len(scores)):
        keys = [*scores[n, near[n]], logit]
        top = torch.stack(keys).max() if near[n].any() else torch.zeros(())
        factor = g if near[n].any() else torch.ones(())
        row = present(weights.kernel)[n] * far[n] + factor * torch.where(near[n], (scores[n] - top).exp(), 0)
        sink = factor * (logit - top).exp()
        first = torch.eye(len(scores), dtype=row.dtype)[0]
        rows.append((row + sink * first) / (row.sum() + sink))
    return torch.stack(rows)


@dataclass(frozen=True)
class Weighing:
    """phi_q(n) . D(n,j) phi_k(j) of all pairs j <= n [T,T], or where features are exponentials, its logarithm.

    `reference` [T]: what eq. 7's features are over, the query's largest logarithm plus that of all keys so far.
    """

    kernel: Tensor | None
    logs: Tensor
    reference: Tensor

    def alone(self, keys: Tensor) -> Tensor:
        """The weights of these keys over their sum."""
        return _softmax(self.logs, keys) if self.kernel is None else _over_sum(self.kernel * keys)


def _over_sum(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)


def _weighing(config: Any, w: Weights, h: int, heads: int, q: Tensor, k: Tensor, hidden: Tensor | None) -> Weighing:
    phi_q = _features(config.feature_map, q, w.query_weight, w.query_bias, h, heads)
    phi_k = _features(config.feature_map, k, w.key_weight, w.key_bias, h, heads)
    none = torch.zeros(len(q), len(q), dtype=torch.float64)
    log_decay, scale = none, torch.ones(len(q))
    if config.decay is not None:
        steps, scale = _decay(config.decay, w, h, heads, len(q), hidden)
        log_decay = (steps.cumsum(0)[:, None] - steps.cumsum(0)).clamp_max(0)
    if not exponential(config.feature_map):
        return Weighing((phi_q @ phi_k.T * log_decay.exp() * scale).tril(), none, none[0])
    logs = torch.logsumexp(phi_q[:, None] + phi_k[None], -1) + log_decay + scale.log()
    return Weighing(None, logs, phi_q.amax(-1) + phi_k.amax(-1).cummax(0).values)


def _features(part: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, h: int, heads: int) -> Tensor:
    """phi of one head's queries or keys [T,F], or its logarithms."""
    if part.type == "elu1":
        return F.elu(x) + 1
    rows = present(weight)
    index = h // (heads // len(rows))
    z = x @ rows[index]
    z = z if bias is None else z + bias[index]
    if part.type == "lolcat":
        z = z + x
        return {"relu": F.relu(z), "elu1": F.elu(z) + 1, "exp": z}[part.activation]
    assert part.type == "hedgehog"
    if part.activation == "exp":
        return torch.cat([z, -z], dim=-1)
    return torch.cat([z.softmax(-1), (-z).softmax(-1)], dim=-1).clamp_min(1e-12)


def _decay(decay: Any, w: Weights, h: int, heads: int, length: int, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log decay of each step, and what each key is scaled by."""
    if decay.type == "fixed":
        assert decay.schedule == "retnet"
        return torch.full((length,), math.log1p(-(2.0 ** (-5 - h))), dtype=torch.float64), torch.ones(length)
    assert decay.type == "scalar" and decay.input_scale
    rows = present(w.gate_weight)
    index = h // (heads // len(rows))
    g = present(hidden) @ rows[index] + present(w.gate_bias)[index]
    return F.logsigmoid(g), torch.sigmoid(-g)
