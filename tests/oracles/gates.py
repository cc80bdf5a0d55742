"""Decays and write strengths of one head at one token, from the layer's hidden state x [E], in float64.

Decays are returned as logarithms. Weights have one row per output: W [outputs, E], applied as W x + b.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_sigmoid(a: Tensor) -> Tensor:
    """log(1 / (1 + e^-a)) elementwise, without overflow."""
    logs = [-math.log1p(math.exp(-value)) if value > 0 else value - math.log1p(math.exp(value)) for value in _list(a)]
    return torch.tensor(logs, dtype=torch.float64).reshape(a.shape)


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + e^-a) elementwise."""
    return log_sigmoid(a.double()).exp()


def _list(a: Tensor) -> list[float]:
    return a.double().flatten().tolist()


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b. x [E], weight [n,E], bias [n] -> [n]."""
    a = weight.double() @ x.double()
    return a if bias is None else a + bias.double()


# --- fixed decays -----------------------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 (h + 1) / H); for H not a power of two, those of the power below, then every second one of twice it."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def log_fixed(schedule: str, head: int, heads: int) -> float:
    """log gamma of query head `head`: lightning gamma_h = exp(-slope_h) (SUPRA), RetNet gamma_h = 1 - 2^(-5-h)."""
    if schedule == "lightning":
        return -alibi_slopes(heads)[head]
    if schedule == "retnet":
        return math.log1p(-(2.0 ** (-5 - head)))
    raise ValueError(schedule)


# --- gates ------------------------------------------------------------------------------------------------------------


def scalar_gate(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """RFA: (log g, 1 - g) with g = sigmoid(w.x + b). weight [E], bias []."""
    a = affine(x, weight[None], bias.reshape(1))
    return float(log_sigmoid(a)), float(sigmoid(-a))


def low_rank_gate(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, temperature: float) -> Tensor:
    """GLA: log alpha [F], alpha = sigmoid(W2 W1 x + b)^(1/temperature). down W1 [rank,E], up W2 [F,rank], bias [F]."""
    return log_sigmoid(affine(affine(x, down, None), up, bias)) / temperature


def outer_gate(
    x: Tensor, feature_weight: Tensor, feature_bias: Tensor, value_weight: Tensor, value_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Mao, ReGLA eq. 10: logs of sigmoid(W_f x + b_f) [F] and sigmoid(W_z x + b_z) [D], one per axis of S."""
    return log_sigmoid(affine(x, feature_weight, feature_bias)), log_sigmoid(affine(x, value_weight, value_bias))


def refined_gate(x: Tensor, weight: Tensor, bias: Tensor, refine_weight: Tensor, refine_bias: Tensor) -> Tensor:
    """ReGLA eqs. 16-18: log f, f = (1 - r) g^2 + r (1 - (1 - g)^2), g and r sigmoids of W_g x + b_g, W_r x + b_r.

    1 - (1 - g)^2 is written g (1 + (1 - g)), which does not cancel for small g.
    """
    a, c = affine(x, weight, bias), affine(x, refine_weight, refine_bias)
    g, one_minus_g, r, one_minus_r = sigmoid(a), sigmoid(-a), sigmoid(c), sigmoid(-c)
    return (one_minus_r * g**2 + r * g * (1 + one_minus_g)).log()


# --- the delta rule ---------------------------------------------------------------------------------------------------


def write_strength(x: Tensor, weight: Tensor) -> float:
    """DeltaNet: b = sigmoid(w.x). weight [E]."""
    return float(sigmoid(affine(x, weight[None], None)))


def unit_sum(phi: Tensor) -> Tensor:
    """DeltaNet: phi over the sum of its features, at least 1e-6."""
    return phi / max(float(phi.sum()), 1e-6)


def unit_norm(phi: Tensor) -> Tensor:
    """Gated DeltaNet: phi over its Euclidean norm, at least 1e-6."""
    return phi / max(math.sqrt(float((phi * phi).sum())), 1e-6)
