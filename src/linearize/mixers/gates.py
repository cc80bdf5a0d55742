"""Compute decays of the state S [F, D] of linear attention, and the strength of the delta rule.

A recipe names a decay config as `decay`; a gate computes it. Gates return logarithms, computed by logsigmoid(x):
log(sigmoid(x)) is -inf or 0 for inputs where logsigmoid(x) is not. A key's value is added to S, or replaces the value
that S returns for the key (`DeltaRule`).

Hs heads of the state, F features per head, D head dimension, x the layer's input.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from linearize.configs.mixer_parts import (
    DecayConfig,
    DeltaUpdate,
    FeatureDecay,
    FixedDecay,
    OuterDecay,
    RefinedDecay,
    ScalarDecay,
)
from linearize.configs.shape import LayerShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.partial import accumulation_dtype

MIN_NORM = 1e-6  # the least norm of features by which the delta rule divides

# --- the base class ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateOut:
    """Log decays of each step on the feature and the value axis of S, never positive; the factor of new keys.

    fp32, or fp64 for fp64 inputs; None if the gate does not compute it.
    """

    log_decay_k: Float[Tensor, "#B Hs T X"] | None = None
    log_decay_v: Float[Tensor, "#B Hs T D"] | None = None
    input_scale: Float[Tensor, "#B Hs T 1"] | None = None


class Gate(nn.Module, ABC):
    """Base class of decays; its children are `Affine` maps of the layer's input."""

    def __init__(self, config: Any, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, inputs: AttnInputs) -> GateOut: ...

    def choose(self, heads: int, mine: list[int]) -> None:
        """Make this the gate of the query heads `mine` out of `heads` heads of a layer or group.

        Constants depend on the heads. A learned gate ignores this: it has weights for these heads alone.
        """

    def reset_parameters(self) -> None:
        """Initialise every parameter as the config says."""
        for affine in self.children():
            assert isinstance(affine, Affine)
            affine.reset_parameters()


class Affine(nn.Module):
    """W x + b, `width` numbers per head. W starts like that of nn.Linear, b at `bias_init`; None: there is no b."""

    def __init__(self, inputs: int, heads: int, width: int, bias_init: float | None) -> None:
        super().__init__()
        self.heads, self.bias_init = heads, bias_init or 0.0
        self.weight = nn.Parameter(torch.empty(inputs, heads * width))
        self.bias = None if bias_init is None else nn.Parameter(torch.empty(heads * width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = len(self.weight) ** -0.5
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.fill_(self.bias_init)

    def forward(self, x: Float[Tensor, "B T N"]) -> Float[Tensor, "B Hs T X"]:
        y = x @ self.weight.to(x.dtype)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def layer_input(inputs: AttnInputs) -> Float[Tensor, "B T E"]:
    """Return the input of gates, in fp32, or fp64 for fp64 inputs; raise ValueError if it was not passed."""
    if inputs.hidden is None:
        raise ValueError(
            "AttnInputs.hidden: expected the layer's input, which this mixer's gates read; found None. "
            "Pass it (mixer.wants_hidden says when), or choose a mixer without a learned decay and the delta rule"
        )
    return inputs.hidden.to(accumulation_dtype(inputs.v.dtype))


# --- constants --------------------------------------------------------------------------------------------------------


class FixedGate(Gate):
    """One constant decay per head, which does not read the layer's input."""

    def __init__(self, config: FixedDecay, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__(config, shape, heads, feature_dim)
        self.heads = heads
        self.mine: slice | list[int] = slice(None)

    def choose(self, heads: int, mine: list[int]) -> None:
        self.heads, self.mine = heads, mine

    def forward(self, inputs: AttnInputs) -> GateOut:
        # Computed at every call: a buffer would be rounded in a bfloat16 student.
        log_decay = SCHEDULES[self.config.schedule](self.heads, inputs.v.device)[self.mine]
        log_decay = log_decay.to(accumulation_dtype(inputs.v.dtype))
        return GateOut(log_decay_k=log_decay[None, :, None, None].expand(-1, -1, inputs.v.shape[2], -1))


def lightning(heads: int, device: torch.device) -> Float[Tensor, " H"]:
    """Return log gamma_h = -r^(h+1), r = 2^(-8/H), which are ALiBi's slopes.

    If H is no power of 2, these are the slopes for c = 2^floor(log2 H) heads, then every second one for 2c heads.
    """
    whole = 2 ** (heads.bit_length() - 1)
    step = torch.arange(1, heads + 1, device=device, dtype=torch.float64)
    step = torch.where(step > whole, step - whole - 0.5, step)
    return -torch.exp2(-8 / whole * step)


def retnet(heads: int, device: torch.device) -> Float[Tensor, " H"]:
    """Return log gamma_h = log(1 - 2^(-5-h))."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(heads, device=device, dtype=torch.float64)))


SCHEDULES: dict[str, Callable[[int, torch.device], Tensor]] = {"lightning": lightning, "retnet": retnet}


# --- learned decays ---------------------------------------------------------------------------------------------------


class ScalarGate(Gate):
    """log g per head and, with `input_scale`, 1 - g as the factor of keys."""

    def __init__(self, config: ScalarDecay, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__(config, shape, heads, feature_dim)
        self.g = Affine(shape.hidden_size, heads, 1, config.bias_init)

    def forward(self, inputs: AttnInputs) -> GateOut:
        g = self.g(layer_input(inputs))
        return GateOut(log_decay_k=logsigmoid(g), input_scale=torch.sigmoid(-g) if self.config.input_scale else None)


class FeatureGate(Gate):
    """log alpha; `down` is W1, `up` W2 and b."""

    def __init__(self, config: FeatureDecay, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__(config, shape, heads, feature_dim)
        self.down = Affine(shape.hidden_size, 1, config.rank, None)
        self.up = Affine(config.rank, heads, feature_dim, config.bias_init)

    def forward(self, inputs: AttnInputs) -> GateOut:
        alpha = self.up(self.down(layer_input(inputs)).squeeze(1))
        return GateOut(log_decay_k=logsigmoid(alpha) / self.config.temperature)


class OuterGate(Gate):
    """The logarithms of both sigmoids, `f` on the feature axis and `z` on the value axis."""

    def __init__(self, config: OuterDecay, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__(config, shape, heads, feature_dim)
        self.f = Affine(shape.hidden_size, heads, feature_dim, config.bias_init)
        self.z = Affine(shape.hidden_size, heads, shape.head_dim, config.bias_init)

    def forward(self, inputs: AttnInputs) -> GateOut:
        x = layer_input(inputs)
        return GateOut(log_decay_k=logsigmoid(self.f(x)), log_decay_v=logsigmoid(self.z(x)))


class RefinedGate(Gate):
    """log f, on the value axis or the feature axis."""

    def __init__(self, config: RefinedDecay, shape: LayerShape, heads: int, feature_dim: int) -> None:
        super().__init__(config, shape, heads, feature_dim)
        width = shape.head_dim if config.values else feature_dim
        self.g = Affine(shape.hidden_size, heads, width, config.bias_init)
        self.r = Affine(shape.hidden_size, heads, width, 0.0)

    def forward(self, inputs: AttnInputs) -> GateOut:
        x = layer_input(inputs)
        log_f = refined_log_decay(self.g(x), self.r(x))
        return GateOut(log_decay_v=log_f) if self.config.values else GateOut(log_decay_k=log_f)


def refined_log_decay(g: Float[Tensor, "*s"], r: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return log f for f = (1 - r) g^2 + r (1 - (1 - g)^2), from the logits of g and r.

    f = g (g + 2 r (1 - g)) and 1 - f = (1 - g) ((1 - g) + 2 g (1 - r)) have no differences that lose digits. The first
    is used, in logarithms, where f is small; the second where log f is small.
    """
    forgets = torch.sigmoid(-g)
    lost = forgets * (forgets + 2 * torch.sigmoid(g) * torch.sigmoid(-r))
    log_g = logsigmoid(g)
    of_small = log_g + torch.logaddexp(log_g, logsigmoid(-g) + logsigmoid(r) + math.log(2))
    # The clamp avoids log(0) in the branch that is not taken, whose gradient would be NaN.
    return torch.where(lost > 0.5, of_small, torch.log1p(-lost.clamp_max(0.5)))


DECAYS: dict[type[DecayConfig], Callable[[Any, LayerShape, int, int], Gate]] = {
    FixedDecay: FixedGate,
    ScalarDecay: ScalarGate,
    FeatureDecay: FeatureGate,
    OuterDecay: OuterGate,
    RefinedDecay: RefinedGate,
}


# --- the delta rule ---------------------------------------------------------------------------------------------------


class DeltaRule(nn.Module):
    """b = sigmoid(w.x) per head, and the normalisation of features that the delta rule needs."""

    def __init__(self, config: DeltaUpdate, shape: LayerShape, heads: int) -> None:
        super().__init__()
        self.config = config
        self.strength = Affine(shape.hidden_size, heads, 1, None)

    def reset_parameters(self) -> None:
        """Initialise w."""
        self.strength.reset_parameters()

    def forward(self, inputs: AttnInputs) -> Float[Tensor, "B Hs T 1"]:
        """Return b, the share of the value that the state returns for a key which is replaced."""
        return self.strength(layer_input(inputs)).sigmoid()

    def normalize(self, phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
        """Return `phi` divided by its sum or its Euclidean norm, but by at least 1e-6."""
        return KEY_NORMS[self.config.key_norm](phi)


def over_sum(phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
    return phi / phi.sum(-1, keepdim=True).clamp_min(MIN_NORM)


def over_norm(phi: Float[Tensor, "B h T F"]) -> Float[Tensor, "B h T F"]:
    # Clamp the square: its gradient at 0 is 0, but that of the root is infinite.
    return phi * phi.square().sum(-1, keepdim=True).clamp_min(MIN_NORM**2).rsqrt()


KEY_NORMS: dict[str, Callable[[Tensor], Tensor]] = {"sum": over_sum, "l2": over_norm}
