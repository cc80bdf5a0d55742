"""phi of every feature map, as functions of one query or one key: x [D] -> [F], in float64.

Exponential maps return the logarithms e of their features, unshifted; `linear.py` decides what to subtract from them.
Projections come as W [inputs, outputs] and are applied as x W + b.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b. x [D], weight [D,E], bias [E] -> [E]."""
    z = weight.double().T @ x.double()
    return z if bias is None else z + bias.double()


# --- without weights --------------------------------------------------------------------------------------------------


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.double().clamp(min=0)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return torch.tensor([value / (1 + math.exp(-value)) for value in x.tolist()], dtype=torch.float64)


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, e^x below."""
    return torch.tensor([value + 1 if value > 0 else math.exp(value) for value in x.tolist()], dtype=torch.float64)


def log_exp_t(x: Tensor, temperature: float) -> Tensor:
    """exp(t x) has the logarithm t x."""
    return temperature * x.double()


def cosformer(x: Tensor, position: int, longest: int) -> Tensor:
    """[relu(x) cos(pi i / 2M), relu(x) sin(pi i / 2M)], i the position from 0 and M the longest length."""
    angle = math.pi * position / (2 * longest)
    return torch.cat([relu(x) * math.cos(angle), relu(x) * math.sin(angle)])


def taylor2(x: Tensor) -> Tensor:
    """[1, x', (x' outer x') / sqrt 2], x' = x D^-1/4, with the two equal entries i, j and j, i of the square as one.

    The one stands for both in a product of features, so it is sqrt 2 times as large: x'_i x'_j. The order, which
    matters to gates of single features alone: pairs of y = (1, x') that are 0 apart, then 1 apart, ... modulo len(y).
    """
    y = torch.cat([torch.ones(1, dtype=torch.float64), x.double() / len(x) ** 0.25])
    found = {}
    for apart in range(len(y)):
        for i in range(len(y)):
            j = (i + apart) % len(y)
            if (min(i, j), max(i, j)) not in found:
                found[min(i, j), max(i, j)] = y[i] * y[j] / (math.sqrt(2) if i == j > 0 else 1)
    return torch.stack(list(found.values()))


def dpfp(x: Tensor, nu: int) -> Tensor:
    """concat over j = 1..nu of r * roll(r, j), r = [relu(x), relu(-x)]; roll(r, j)_i = r_(i - j)."""
    r = torch.cat([relu(x), relu(-x)])
    return torch.stack([r[i] * r[(i - j) % len(r)] for j in range(1, nu + 1) for i in range(len(r))])


# --- fixed random projections -----------------------------------------------------------------------------------------


def log_performer(x: Tensor, projection: Tensor) -> Tensor:
    """m^-1/2 exp(w_i.x' - |x'|^2 / 2), x' = x D^-1/4. projection [m,D] has the rows w_i."""
    x = x.double() / len(x) ** 0.25
    squared_norm = sum(float(value) ** 2 for value in x)
    return projection.double() @ x - squared_norm / 2 - math.log(len(projection)) / 2


def rfa(x: Tensor, projection: Tensor, sigma: float) -> Tensor:
    """m^-1/2 [sin(W x^), cos(W x^)], x^ = x / (|x| + 1e-3), W = sigma times the normal `projection` [m,D]."""
    x = x.double()
    x = x / (math.sqrt(float((x * x).sum())) + 1e-3)
    angles = sigma * (projection.double() @ x)
    return torch.cat([angles.sin(), angles.cos()]) / math.sqrt(len(projection))


# --- after a learned projection z = x W + b ---------------------------------------------------------------------------


def softmax_halves(z: Tensor) -> Tensor:
    """LoLCATs App. A: [softmax(z), softmax(-z)], at least 1e-12."""
    return torch.cat([_softmax(z), _softmax(-z)]).clamp(min=1e-12)


def softmax_whole(z: Tensor) -> Tensor:
    """Hedgehog eq. 5 over all 2E features: softmax([z, -z]), at least 1e-12."""
    return _softmax(torch.cat([z, -z])).clamp(min=1e-12)


def log_exp_halves(z: Tensor) -> Tensor:
    """Hedgehog eq. 6: [exp(z), exp(-z)] has the logarithms [z, -z]."""
    return torch.cat([z.double(), -z.double()])


def _softmax(z: Tensor) -> Tensor:
    exponentials = (z.double() - z.double().max()).exp()
    return exponentials / exponentials.sum()
